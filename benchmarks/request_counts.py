"""An object store that counts what it is asked, and a feature store of many shards in it that takes no memory.

A listing is a request for each thousand names, as S3, GCS and their likes have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
import torch
from torch import nn

from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._features.formats import packed
from torchhook._features.shards import encode, name_of
from torchhook._recording.tables import Table

PAGE = 1000


class CountingStore(fsspec.AbstractFileSystem):
    """Objects by name; some are made when they are read, and only their size is kept."""

    protocol = "counted"
    cachable = False
    objects: ClassVar[dict[str, bytes | tuple[int, Callable[[], bytes]]]] = {}
    requests: ClassVar[Counter[str]] = Counter()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.requests["PUT"] += 1
        name = self._strip_protocol(path)
        if mode == "create" and name in self.objects:
            raise FileExistsError(name)
        self.objects[name] = bytes(value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.requests["GET"] += 1
        try:
            found = self.objects[self._strip_protocol(path)]
        except KeyError:
            raise FileNotFoundError(path) from None
        return (found if isinstance(found, bytes) else found[1]())[start:end]

    def rm_file(self, path: str) -> None:
        self.requests["DELETE"] += 1
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        self.requests["HEAD"] += 1
        return self._strip_protocol(path) in self.objects

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        where = self._strip_protocol(path).rstrip("/") + "/"
        inside = [name for name in self.objects if name.startswith(where)]
        here = [name for name in inside if "/" not in name[len(where) :]]
        folders = {where + name[len(where) :].split("/", 1)[0] for name in inside if "/" in name[len(where) :]}
        self.requests["LIST"] += max(1, -(-(len(here) + len(folders)) // PAGE))
        if not inside:
            raise FileNotFoundError(path)
        found = [self._info(name) for name in here] + [{"name": f, "size": 0, "type": "directory"} for f in folders]
        return found if detail else [entry["name"] for entry in found]

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False,
             prefix: str = "", **kwargs: Any) -> Any:  # fmt: skip
        where = self._strip_protocol(path).rstrip("/") + "/" + prefix
        found = {name: self._info(name) for name in self.objects if name.startswith(where)}
        self.requests["LIST"] += max(1, -(-len(found) // PAGE))
        return found if detail else list(found)

    def _info(self, name: str) -> dict[str, Any]:
        held = self.objects[name]
        return {"name": name, "size": len(held) if isinstance(held, bytes) else held[0], "type": "file"}


fsspec.register_implementation("counted", CountingStore, clobber=True)


def run(url: str, rows: int, **options: Any) -> Any:
    """One row of two numbers in each shard."""
    x = torch.arange(rows).float()[:, None].repeat(1, 2)
    options = {"batch_size": 1, "rows_per_shard": 1, "progress": False, **options}
    return extract(nn.Sequential(nn.Identity()), x, "0", url, **options)


def made(url: str, shards: int, present: int, indexed: int) -> None:
    """A store of so many shards of which the first ones are there, and the first of these in a page of the index."""
    objects, root = CountingStore.objects, url.split("://")[1]
    manifest = run(url, shards, dry_run=True).manifest
    objects[f"{root}/store.json"] = manifest.to_json().encode()

    def shard(number: int) -> bytes:
        about = {"shard": str(number), "first_row": str(number), "rows": "1", **manifest.marks}
        return b"".join(encode({"0": torch.full((1, 2), float(number))}, about))

    size = len(shard(0))  # the header fills whole blocks: all of them are of the same size
    for number in range(present):
        objects[f"{root}/{name_of(number)}"] = (size, lambda number=number: shard(number))
    entries = [[number, 1, size, "0" * 8, {}, manifest.plan] for number in range(indexed)]
    name = "index.json" if indexed == shards else "index.0123456789abcdef.json"
    objects[f"{root}/{name}"] = packed(entries)


def counted(call: Callable[[], Any]) -> Counter[str]:
    CountingStore.requests.clear()
    call()
    return Counter(CountingStore.requests)


def table(shards: int = 100_000) -> tuple[Table, dict[str, float]]:
    """What it takes to open such a store, and to go on with it: the shards that are made are not counted."""
    cases: dict[str, tuple[int, int, Callable[[str], Any]]] = {
        "open": (shards, shards, open_features),
        "call again, nothing to do": (shards, shards, lambda url: run(url, shards)),
        "killed at the half, what is left": (
            shards // 2,
            shards // 2 - 5,
            lambda url: run(url, shards, dry_run=True),
        ),
        "go on, 20 shards to make": (shards - 20, shards - 25, lambda url: run(url, shards)),
    }
    lines: list[list[str]] = []
    found: dict[str, float] = {}
    for number, (name, (present, indexed, call)) in enumerate(cases.items()):
        url = f"counted://bucket/{number}"
        made(url, shards, present, indexed)
        asked = counted(lambda call=call, url=url: call(url))  # type: ignore[misc]
        if "to make" in name:
            asked["PUT"] -= shards - present
        found[name] = asked.total()
        lines.append([name, *(str(asked[kind]) for kind in ("LIST", "GET", "PUT", "DELETE")), str(asked.total())])
        CountingStore.objects.clear()
    title = f"Requests to an object store with {shards:,} shards"
    return Table(title, ["what", ">LIST", ">GET", ">PUT", ">DELETE", ">all"], lines), found


if __name__ == "__main__":
    print(table()[0])
