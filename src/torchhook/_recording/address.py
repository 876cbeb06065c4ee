"""Sites and their addresses: ``path[/op][#call][:port]``.

A site is a place where a value passes: a module's path in the model, optionally an operation inside
it, optionally one call only, and a port. ``str(site)`` is its address; ``parse`` reads one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

PORTS = ("output", "input", "grad", "grad_input")


class Site(NamedTuple):
    """Where a value passes.

    >>> str(Site("layer4.1.relu", call=1, port="input"))
    'layer4.1.relu#1:input'
    """

    path: str
    op: str | None = None
    call: int | None = None
    port: str = "output"

    def __str__(self) -> str:
        op = "" if self.op is None else f"/{self.op}"
        call = "" if self.call is None else f"#{self.call}"
        port = "" if self.port == "output" else f":{self.port}"
        return f"{self.path}{op}{call}{port}"

    @property
    def every_call(self) -> Site:
        """The same site without a call index."""
        return self if self.call is None else self._replace(call=None)


def parse(address: str, known: Collection[str] = ()) -> Site:
    """Read an address.

    ``known`` holds paths that exist. A module's name may itself contain ``/``, ``#`` or ``:``, so the
    longest reading whose path is known wins; without one, the grammar decides alone.

    >>> parse("blocks.3.attn/softmax#2:input")
    Site(path='blocks.3.attn', op='softmax', call=2, port='input')
    """
    options = list(readings(address))
    return next((site for site in options if site.path in known), options[-1])


def readings(address: str) -> Iterator[Site]:
    """Every way to read an address, from the plain path to the fully decorated one."""
    yield Site(address)
    rest, port = address, "output"
    head, colon, tail = address.rpartition(":")
    if colon and tail in PORTS:
        rest, port = head, tail
        yield Site(rest, port=port)
    call: int | None = None
    if match := re.fullmatch(r"(.*)#([0-9]{1,9})", rest, re.DOTALL):
        rest, call = match[1], int(match[2])
        yield Site(rest, call=call, port=port)
    head, slash, op = rest.rpartition("/")
    if slash and op:
        yield Site(head, op=op, call=call, port=port)
