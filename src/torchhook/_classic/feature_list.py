"""Several features at once: a list in the order of the paths, read by path too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from torchhook._torch import register_pytree_node
from torchhook.errors import SelectorError, suggestion


class FeatureList(list[Any]):
    """Feature values in the order of the paths; also read and written by path: ``features["features.6"]``.

    As any list it is made of values alone, which is how other libraries rebuild one: the paths are then lost, and that
    is said to whoever asks for one.
    """

    # Each beside its value; what is behind the last has none. Append and extend need not know of them, which pickle
    # calls before anything else is there.
    _paths: list[str | None] | None = None

    def __init__(self, values: Iterable[Any] = (), paths: Iterable[str | None] | None = None) -> None:
        super().__init__(values)
        self._paths = None if paths is None else list(paths)

    def _named(self) -> dict[str, Any]:
        if self._paths is None:
            raise SelectorError(
                f"the paths of these {len(self)} features are lost: what moves or converts outputs (accelerate, "
                "Lightning, FSDP) has made this list anew, of the values alone. Read them by position, in the order of "
                "the paths, or use th.FeatureExtractor, which returns a dict."
            )
        return {path: value for path, value in zip(self._paths, self, strict=False) if path is not None}

    def _position(self, path: str) -> int:
        named = self._named()
        if path not in named or self._paths is None:
            raise SelectorError(f"no feature {path!r} here. {suggestion(path, named)}")
        return self._paths.index(path)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._position(key) if isinstance(key, str) else key)

    def __contains__(self, value: object) -> bool:
        # A list would compare the path with every tensor, and say no.
        return value in self._named() if isinstance(value, str) else super().__contains__(value)

    def __eq__(self, other: object) -> bool:
        # Callers that knew a dict compare with one; callers that know a list, with that.
        if isinstance(other, Mapping):
            return self._paths is not None and self._named() == other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def keys(self) -> list[str]:
        return list(self._named())

    def values(self) -> list[Any]:
        return list(self) if self._paths is None else list(self._named().values())

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._named().items())

    # -- what changes it: a path stays with its value ---------------------------------------------------

    def _aligned(self) -> list[str | None]:
        """The paths, one for each value; those that are lost are lost for what is done to them, too."""
        paths = [] if self._paths is None else self._paths
        paths += [None] * (len(self) - len(paths))
        return paths

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            super().__setitem__(self._position(key), value)
        elif not isinstance(key, slice):
            super().__setitem__(key, value)  # another value of the same path
        else:
            paths, new = self._aligned(), list(value)
            super().__setitem__(key, new)
            if len(self) != len(paths):
                paths[key] = [None] * len(new)

    def __delitem__(self, key: Any) -> None:
        key, paths = self._position(key) if isinstance(key, str) else key, self._aligned()
        super().__delitem__(key)
        del paths[key]

    def insert(self, position: SupportsIndex, value: Any) -> None:
        self._aligned().insert(position, None)
        super().insert(position, value)

    def pop(self, position: Any = -1) -> Any:
        value = self[position]
        del self[position]
        return value

    def remove(self, value: Any) -> None:
        del self[self.index(value)]

    def clear(self) -> None:
        del self[:]

    def reverse(self) -> None:
        self._aligned().reverse()
        super().reverse()

    def sort(self, **options: Any) -> None:
        super().sort(**options)
        self._paths = None

    def copy(self) -> FeatureList:
        return FeatureList(self, self._paths)


# For what maps over nested values. An exported program holds none: it loads where torchhook is not installed.
register_pytree_node(FeatureList, lambda f: (list(f), f._paths), lambda new, paths: FeatureList(new, paths))
