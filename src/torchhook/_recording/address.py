"""Sites and their addresses: ``path[/op][#call][:port[.leaf]]``.

A site is a place where a value passes: a module's path in the model, optionally an operation inside
it, optionally one call only, a port, and optionally one leaf of the value. A site is its address: a string that knows
its parts. One that was chosen by a standard name (``@resid_post.3``) has that name for its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

PORTS = ("output", "input", "grad", "grad_input", "grad_total")
MODEL = "(model)"
"""How the model itself is called where its path, which is empty, would not be seen. It is read like that too."""


class Site(str):
    """Where a value passes.

    >>> site = Site("layer4.1.relu", call=1, port="input")
    >>> site
    'layer4.1.relu#1:input'
    >>> site == "layer4.1.relu#1:input", site.path, site.call
    (True, 'layer4.1.relu', 1)
    """

    path: str
    op: str | None
    call: int | None
    port: str
    leaf: str
    """The part of a nested value that is meant, as ``edits.at`` names it; empty for all of it."""
    role: str
    """The standard name by which it was chosen; empty for most."""
    __slots__ = ("call", "leaf", "op", "path", "port", "role")

    def __new__(
        cls,
        path: str,
        op: str | None = None,
        call: int | None = None,
        port: str = "output",
        leaf: str = "",
        role: str = "",
    ) -> Site:
        text = path
        if role:
            text = role
        elif op is not None:
            text = f"{text}/{op}"
        if call is not None:
            text = f"{text}#{call}"
        if port != "output" or leaf:
            text += _role_suffix(port) if role else f":{port}.{leaf}" if leaf else f":{port}"
        site = str.__new__(cls, text)
        site.path = path
        site.op = op
        site.call = call
        site.port = port
        site.leaf = leaf
        site.role = role
        return site

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Site):  # a module's own name may look like an address with a port
            if self.role or other.role:
                return str.__eq__(self, other)
            return self.parts == other.parts and self.leaf == other.leaf
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    # str has a __ne__ of its own, which Python would take before the opposite of __eq__.
    def __ne__(self, other: object) -> bool:
        return not self == other

    # Gone with __eq__; and a plain string must find what was put under a site.
    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = str.__hash__  # as it is: a method in Python would make every lookup slower

    # Else a copy would be made of the text alone, and take all of it for the path.
    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self.parts, self.leaf, self.role)

    @property
    def parts(self) -> tuple[str, str | None, int | None, str]:
        """Path, operation, call and port."""
        return self.path, self.op, self.call, self.port

    @property
    def every_call(self) -> Site:
        """The same site without a call index."""
        return self if self.call is None else self.but(call=None)

    @property
    def shown(self) -> str:
        """The address for people: the model itself has a name here."""
        return str(self) if self.path else MODEL + self

    def but(self, **parts: Any) -> Site:
        """The same site with other parts.

        >>> Site("fc").but(port="grad")
        'fc:grad'
        """
        own = {"path": self.path, "op": self.op, "call": self.call, "port": self.port}
        return Site(**{**own, "leaf": self.leaf, "role": self.role, **parts})

    @property
    def place(self) -> Site:
        """The same site under its own address, where a standard name stands for it."""
        return self.but(role="") if self.role else self


def _role_suffix(port: str) -> str:
    """A standard name means one value, wherever that is read: its port only tells the value from its gradient."""
    if port in ("output", "input"):
        return ""
    return ":grad" if port == "grad_input" else f":{port}"


def shown(address: str) -> str:
    """An address for people: the model itself, whose path is empty, has a name there.

    >>> shown(""), shown(":input"), shown("fc:input")
    ('(model)', '(model):input', 'fc:input')
    """
    return MODEL + address if address[:1] in ("", "/", "#", ":") else address


def meant(address: str) -> str:
    """An address as it is, whether it was written for people or not: the other way round from ``shown``.

    >>> meant("(model):input"), meant("fc:input")
    (':input', 'fc:input')
    """
    return address.removeprefix(MODEL) if re.match(r"\(model\)(?:$|[/#:])", address) else address


def parse(address: str, known: Collection[str] = ()) -> Site:
    """Read an address.

    ``known`` holds paths that exist. A module's name may itself contain ``/``, ``#`` or ``:``, so the
    longest reading whose path is known wins; without one, the grammar decides alone.

    >>> parse("blocks.3.attn/softmax#2:input").parts
    ('blocks.3.attn', 'softmax', 2, 'input')
    """
    options = list(readings(address))
    return next((site for site in options if site.path in known), options[-1])


def readings(address: str) -> Iterator[Site]:
    """Every way to read an address, from the plain path to the fully decorated one."""
    address = meant(address)
    yield Site(address)
    rest, port = address, "output"
    head, colon, tail = address.rpartition(":")
    leaf = ""
    if colon and tail.partition(".")[0] in PORTS:
        rest = head
        port, _, leaf = tail.partition(".")
        yield Site(rest, port=port, leaf=leaf)
    call: int | None = None
    # Not \d, which knows the digits of other scripts too. DOTALL: a module's name may hold a line break.
    if match := re.fullmatch(r"(.*)#([0-9]{1,9})", rest, re.DOTALL):
        rest, call = match[1], int(match[2])
        yield Site(rest, call=call, port=port, leaf=leaf)
    head, slash, op = rest.rpartition("/")
    if slash and op:
        yield Site(head, op=op, call=call, port=port, leaf=leaf)
