"""Which site of one model belongs to which of another, where their names differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torchhook._recording.address import Site, meant, parse
from torchhook.errors import MissingRecordError, suggestion

Names: TypeAlias = "Mapping[str, str | None] | Callable[[str], str | None]"


class Counterparts:
    """Which site of B belongs to a site of A.

    A mapping's keys are paths, which stand for everything below them too, or whole addresses (``"relu#1"``); the most
    specific one counts, and names that are not mapped stay. ``None`` leaves a site out.
    """

    def __init__(self, names: Names | None, paths_a: Sequence[str], paths_b: Sequence[str]) -> None:
        self._function = names if callable(names) else None
        if names is not None and self._function is None and not isinstance(names, Mapping):
            raise TypeError(f"names= is a dict of names or a function of a name, found {type(names).__name__}.")
        given = names if isinstance(names, Mapping) else {}
        self._names = {meant(name): None if other is None else meant(other) for name, other in given.items()}
        self._b = set(paths_b)
        below = {path[:i] for path in paths_a for i in range(len(path) + 1) if path[i : i + 1] in ("", ".")}
        self._exact = {parse(key, below): key for key in self._names if key not in below}

    def of(self, site: Site) -> Site | None:
        """The counterpart of a site, which may name a call."""
        for exact in (site, site.every_call):
            if exact in self._exact:
                name = self._names[self._exact[exact]]
                if name is None:
                    return None
                target = parse(name, self._b)
                call = target.call if target.call is not None else None if exact.call is not None else site.call
                return target.but(call=call)
        if self._function is not None:
            path = self._function(site.path)
            path = None if path is None else meant(path)
        else:
            path = site.path
            prefixes = [key for key in self._names if key == path or path.startswith(f"{key}.")]
            if prefixes:
                key = max(prefixes, key=len)
                name = self._names[key]
                path = None if name is None else name + path[len(key) :]
        return None if path is None else site.but(path=path)

    def all_of(self, site: Site) -> list[Site]:
        """Every counterpart that some call of the site may have."""
        special = [exact for exact in self._exact if exact.every_call == site.every_call]
        found = (self.of(s) for s in [site, *special])
        return list(dict.fromkeys(s.every_call for s in found if s is not None))

    def check_used(self, sites: Sequence[Site]) -> None:
        """Refuse a key that names nothing: a typing error must not pass as a mapping."""
        known = {text for site in sites for text in (site, site.every_call)}
        for exact, key in self._exact.items():
            if exact not in known:
                addresses = [*dict.fromkeys(site.path for site in sites), *map(str, known)]
                raise MissingRecordError(f"names: {key!r} is no site of A. {suggestion(key, addresses)}".rstrip())
