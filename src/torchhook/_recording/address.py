"""Sites and their addresses: ``path[/op][#call][:port[.leaf]]``.

A site is a place where a value passes: a module's path in the model, optionally an operation inside
it, optionally one call or some of them, a port, and optionally one leaf of the value. A site is its address: a string
that knows its parts. One that was chosen by a standard name (``@resid_post.3``) has that name for its text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchhook._values.heads import KnownHeads, NoPart, token_dim

PORTS = ("output", "input", "grad", "grad_input", "grad_total")
MODEL = "(model)"
"""How the model itself is called where its path, which is empty, would not be seen. It is read like that too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """Some of the calls of a site, as a slice chooses them; negative numbers count from the last one.

    >>> str(Calls(1, None)), 1 in Calls(1, 3), 3 in Calls(1, 3)
    ('1:', True, False)
    """

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        return ":".join("" if end is None else str(end) for end in (self.start, self.stop))

    def __contains__(self, call: int) -> bool:
        """Whether a call is one of them, where both ends are counted from the first call."""
        return (self.start or 0) <= call and (self.stop is None or call < self.stop)

    @property
    def is_empty(self) -> bool:
        """Whether no number of calls would be enough: ``3:3``, ``-1:-2``."""
        start, stop = self.start or 0, self.stop
        return stop is not None and (stop == 0 or (stop <= start and (stop < 0) == (start < 0)))


Which = int | Calls | None
"""Which calls of a site: one, some, or every one. Records have a number, selectors any of them."""


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
    call: Which
    port: str
    leaf: str
    """The part of a nested value that is meant, as ``edits.at`` names it; empty for all of it."""
    role: str
    """The standard name by which it was chosen; empty for most."""
    is_output: bool
    """Whether it is all that a module returns, whenever it is called, under the module's own name."""
    __slots__ = ("call", "is_output", "leaf", "op", "path", "port", "role")

    def __new__(
        cls,
        path: str,
        op: str | None = None,
        call: Which = None,
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
        site.is_output = text == path and op is None and call is None and port == "output" and not leaf
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
    def kind(self) -> str:
        """What its standard name is about, if it has one: ``"k"`` of ``@decoder.k.3``.

        >>> Site("h.3.attn", role="@decoder.k.3").kind, Site("head", role="@logits").kind, Site("h.3").kind
        ('k', 'logits', '')
        """
        # Where a name was read from text alone, nobody has said what it stands for.
        name = self.role or (self.path if self.path.startswith("@") else "")
        words = [word for word in name.removeprefix("@").split(".") if not word.isdecimal()]
        return words[-1] if words else ""

    @property
    def is_asked(self) -> bool:
        """Whether these are queries that a fused kernel is given, or what it makes of them."""
        if self.op is None:
            return self.kind == "q"  # a name that was read from a file
        fused = self.op.partition("(")[0] == "scaled_dot_product_attention"
        return fused and (self.port not in ("input", "grad_input") or self.leaf in ("args.0", "kwargs.query"))

    def token_dim(self, shape: Sequence[int]) -> int | None:
        """Which dim of a value the tokens are, by what its name says of heads; ``None`` where that does not tell.

        >>> Site("attn", role="@q.1").token_dim((2, 8, 5, 4)), Site("h").token_dim((2, 5, 32))
        (2, 1)
        """
        known = KnownHeads(op=self.op, heads_first=self.kind in ("q", "k", "v", "pattern"))
        try:
            return token_dim(shape, known)
        except NoPart:
            return None

    @property
    def parts(self) -> tuple[str, str | None, Which, str]:
        """Path, operation, call and port."""
        return self.path, self.op, self.call, self.port

    @property
    def every_call(self) -> Site:
        """The same site without a call index."""
        return self if self.call is None else self.but(call=None)

    @property
    def first_call(self) -> int:
        """The call that it names, or the first of them."""
        named = self.call.start if isinstance(self.call, Calls) else self.call
        return named or 0

    @property
    def counts_back(self) -> bool:
        """Whether its calls are counted from the last one, which is known only when all are over."""
        if self.call is None:
            return False
        ends = (self.call.start, self.call.stop) if isinstance(self.call, Calls) else (self.call,)
        return any(end is not None and end < 0 for end in ends)

    def means(self, call: int) -> bool:
        """Whether it names a call, by numbers that are counted from the first one.

        >>> Site("relu").means(4), Site("relu", call=1).means(4), Site("relu", call=Calls(1, None)).means(4)
        (True, False, True)
        """
        return call in self.call if isinstance(self.call, Calls) else self.call in (None, call)

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
        return type(self)(**{**own, "leaf": self.leaf, "role": self.role, **parts})

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


# Not \d, which knows the digits of other scripts too. DOTALL: a module's name may hold a line break. One colon at most:
# that of a port comes after it ("relu#1::input"), and "relu#1:input" has no other reading, for no port is a number.
_CALL = re.compile(r"(.*)#(-?[0-9]{1,9}|(?=:?-?[0-9])(?:-?[0-9]{1,9})?:(?:-?[0-9]{1,9})?)", re.DOTALL)


def _which(text: str) -> int | Calls:
    start, colon, stop = text.partition(":")
    return Calls(*(int(end) if end else None for end in (start, stop))) if colon else int(start)


def call_hint(address: str, known: Collection[str]) -> str:
    """A sentence on how calls are written, where an address says something else behind the ``#`` of a known path.

    >>> call_hint("relu#last", ["relu"])
    "'#last' names no call of 'relu': write '#1' for one, '#1:' for those from there on, '#:2', '#0:3', '#-1' the last."
    """
    path, mark, calls = address.partition("#")
    if not mark or path not in known:
        return ""
    return (
        f"{'#' + calls!r} names no call of {shown(path)!r}: write '#1' for one, '#1:' for those from there on, '#:2', "
        "'#0:3', '#-1' the last."
    )


def parse(address: str, known: Collection[str] = ()) -> Site:
    """Read an address.

    ``known`` holds paths that exist. A module's name may itself contain ``/``, ``#`` or ``:``, so the
    longest reading whose path is known wins; without one, the grammar decides alone.

    >>> parse("blocks.3.attn/softmax#2:input").parts
    ('blocks.3.attn', 'softmax', 2, 'input')
    >>> parse("relu#1::input").parts
    ('relu', None, Calls(start=1, stop=None), 'input')
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
    call: Which = None
    if match := _CALL.fullmatch(rest):
        rest, call = match[1], _which(match[2])
        yield Site(rest, call=call, port=port, leaf=leaf)
    head, slash, op = rest.rpartition("/")
    if slash and op:
        yield Site(head, op=op, call=call, port=port, leaf=leaf)
