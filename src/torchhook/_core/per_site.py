"""Which transform a site has, where a mapping gives them by selectors: ``transform={"*.mlp": a, nn.Linear: b}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torchhook._core.index import Index
from torchhook._core.select import resolve
from torchhook._core.targets import Target, live_tensor
from torchhook._recording.address import Calls, Site
from torchhook.errors import SelectorError, suggestion
from torchhook.transforms import Transform

Transforms: TypeAlias = "Transform | Mapping[Any, Transform | None] | None"
"""One for all sites, or one for those that each selector of a mapping means; ``None`` keeps a value whole."""


def by_target(
    transform: Transforms, index: Index, targets: Sequence[Target], port: str = "output", name: str = "transform"
) -> list[Transform | None]:
    """The transform of each target. Of a mapping, a site's own address comes before a selector that means more."""
    if transform is None or not isinstance(transform, Mapping):
        check(name, transform)
        return [transform] * len(targets)
    for key, one in transform.items():
        check(f"{name}[{key!r}]", one)
    meant = [(key, _meant(key, index, targets, port, name)) for key in transform]
    found: list[Transform | None] = []
    for target in targets:
        site = target.site
        keys = [key for key, sites in meant if site in sites]
        # "*" for all and an address for the one that differs is how one writes it: no conflict.
        keys = [key for key in keys if isinstance(key, str) and key in (str(site), site.shown)] or keys
        if len(keys) > 1:
            raise SelectorError(
                f"{name}: {' and '.join(map(repr, keys))} all mean {site.shown!r}. Leave one, or add "
                "that site's own address."
            )
        found.append(transform[keys[0]] if keys else None)
    return found


def check(name: str, transform: Any) -> None:
    """Refuse what is no transform."""
    if transform is not None and not callable(transform):
        raise TypeError(f"{name} must be callable, found {type(transform).__name__}.")


def _meant(key: Any, index: Index, targets: Sequence[Target], port: str, name: str) -> set[Site]:
    """The sites that a selector means of those that are kept; without a call index it means every call."""
    why: SelectorError | None = None
    try:
        selected = {(_identity(one), one.site.but(path="")) for one in resolve(index, key, port=port)}
    except SelectorError as error:
        selected, why = set(), error
    found = set()
    for target in targets:
        # Without their paths: what is shared has several.
        own, bare = _identity(target), target.site.but(path="")
        if (own, bare) in selected or (own, bare.every_call) in selected:
            found.add(target.site)
    if not found:
        near = suggestion(str(key), [target.site.shown for target in targets])
        raise SelectorError(f"{name}[{key!r}]: no such site is kept. {near}") from why
    return found


def _identity(target: Target) -> int:
    return id(target.module if target.tensor is None else live_tensor(target))


class PerSite:
    """The transforms of sites that do not all have the same one."""

    def __init__(self, targets: Sequence[Target], transforms: Sequence[Transform | None]) -> None:
        self._found: dict[Site, list[tuple[Site, Transform | None]]] = {}
        for target, transform in zip(targets, transforms, strict=True):
            self._found.setdefault(target.site.every_call, []).append((target.site, transform))
        for several in self._found.values():
            _refuse_two_of_one_call(several)

    def of(self, site: Site) -> Transform | list[tuple[Site, Transform | None]] | None:
        """The transform of a site, or those of the calls of it that are named, where they differ."""
        several = self._found[site.every_call]
        first = several[0][1]
        return first if all(one is first for _, one in several) else several


def _refuse_two_of_one_call(several: list[tuple[Site, Transform | None]]) -> None:
    """Of a call there is one record: names that may mean the same one must have the same transform."""
    for i, (site, transform) in enumerate(several):
        for other, another in several[:i]:
            if transform is not another and _may_meet(site, other):
                raise SelectorError(
                    f"transform: {other.shown!r} and {site.shown!r} may be the same call, which is kept once, and have "
                    "different transforms. Give both the same one, or capture one of them in a session of its own."
                )


def _may_meet(site: Site, other: Site) -> bool:
    if site.counts_back or other.counts_back:  # which call is the last is known when it is over
        return True
    (start, stop), (begin, end) = _span(site), _span(other)
    return max(start, begin) < min(stop, end)


def _span(site: Site) -> tuple[float, float]:
    if isinstance(site.call, Calls):
        return site.call.start or 0, float("inf") if site.call.stop is None else site.call.stop
    return (0, float("inf")) if site.call is None else (site.call, site.call + 1)


def chosen(targets: Sequence[Target], transforms: Sequence[Transform | None]) -> Transform | PerSite | None:
    """How ``Keep`` takes the transforms of targets: as one, where all have the same."""
    # By identity: an equality of the user's own might compare tensors.
    first = transforms[0] if transforms else None
    return PerSite(targets, transforms) if [1 for one in transforms if one is not first] else first
