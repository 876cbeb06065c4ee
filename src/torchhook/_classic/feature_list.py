"""Several features at once: a list in the order of the paths, read by path too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchhook._torch import register_pytree_node
from torchhook.errors import SelectorError, suggestion


class FeatureList(list[Any]):
    """Feature values in the order of the paths; also read by path: ``features["features.6"]``."""

    def __init__(self, named: list[tuple[str, Any]]) -> None:
        super().__init__(value for _, value in named)
        self._named = dict(named)
        self._paths = [path for path, _ in named]

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._named:
            raise SelectorError(f"no feature {key!r} here. {suggestion(key, self._named)}")
        return self._named[key]

    def __contains__(self, value: object) -> bool:
        # A list would compare the path with every tensor, and say no.
        return value in self._named if isinstance(value, str) else super().__contains__(value)

    def __eq__(self, other: object) -> bool:
        # Callers that knew a dict compare with one; callers that know a list, with that.
        return self._named == other if isinstance(other, Mapping) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def keys(self) -> list[str]:
        return list(self._named)

    def values(self) -> list[Any]:
        return list(self._named.values())

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._named.items())


# For what maps over nested values. An exported program holds none: it loads where torchhook is not installed.
register_pytree_node(
    FeatureList, lambda f: (list(f), f._paths), lambda new, paths: FeatureList(list(zip(paths, new, strict=True)))
)
