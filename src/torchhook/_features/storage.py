"""Where a store lives, a folder or an object store, and the one promise both make: a file is there whole or not at all.

``create`` never overwrites. In a folder the bytes go to a temporary name, are synced, and are then linked to the final
name, which fails if another writer was first. In an object store it is one conditional PUT.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torchhook._features import direct_io
from torchhook._features.direct_io import Chunks, fcntl
from torchhook.errors import require

_MOST_BYTES = 1 << 30
_WINDOWS = os.name == "nt"
_STALE_SECONDS = 30.0  # a living writer has no lock yet when it has just made its file


class Storage(Protocol):
    """Files by relative name."""

    url: str

    @property
    def lists_parts(self) -> bool:
        """Whether it pays to list only names with a prefix: an object store asks once for each thousand names."""

    def create(self, name: str, chunks: Chunks) -> bool:
        """Write a new file; ``False`` if there is one already, which then stays as it is."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file over the old one, if there is one."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``[start, end)``; a ``FileNotFoundError`` if the file is not there."""

    def remove(self, name: str) -> None:
        """Take a file away; none there is fine."""

    def sizes(self, folder: str, prefix: str = "") -> dict[str, int]:
        """Names (with the folder) and sizes of the files in a folder; an absent folder is empty.

        Of those whose names begin with ``prefix``; the folder ``""`` is the store's own.
        """

    def free(self) -> int | None:
        """Bytes that still fit, where one can know."""

    def sweep(self, folder: str) -> None:
        """Remove what writers that died have left in a folder, if they could leave anything."""

    def warm(self, folder: str) -> None:
        """The files of a folder are likely to be read now."""


def absolute(path: str | os.PathLike[str]) -> str:
    """The path as every process means the same by it, whatever its working folder is; a URL stays as it is.

    >>> absolute("s3://bucket/features"), absolute("features") == os.path.abspath("features")
    ('s3://bucket/features', True)
    """
    scheme, mark, rest = os.fspath(path).rpartition("://")
    if mark and scheme not in ("file", "local"):
        return os.fspath(path)
    return scheme + mark + os.path.abspath(rest)


def locate(path: str | os.PathLike[str]) -> Storage:
    """A local folder, or any URL that fsspec knows.

    >>> locate("features").url
    'features'
    """
    text = os.fspath(path)
    if "://" not in text:
        return Folder(text)
    if text.startswith(("file://", "local://")):
        return Folder(text.split("://", 1)[1])
    return Bucket(text)


class Folder:
    """A folder of a file system with hard links."""

    lists_parts = False  # one pass over a folder is cheap, and gives all of it

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self.root = Path(path)

    def create(self, name: str, chunks: Chunks) -> bool:
        final = self.root / name
        # Only to save the work: it is the link below that decides.
        if final.exists():
            return False
        with self._written(final, chunks) as temporary:
            try:
                # On Windows, a name is never given twice; elsewhere, that is what links are for.
                (os.rename if _WINDOWS else os.link)(temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                # No hard links here. The same rows are the same bytes, so whoever comes last changes nothing.
                os.replace(temporary, final)
        return True

    def replace(self, name: str, data: bytes) -> None:
        final = self.root / name
        with self._written(final, [data]) as temporary:
            os.replace(temporary, final)

    @contextlib.contextmanager
    def _written(self, final: Path, chunks: Chunks) -> Iterator[Path]:
        """A temporary file beside ``final`` that holds the chunks; the folder is synced after the block."""
        _make_folder(final.parent)
        # In the same folder: links do not reach over file systems. A number by chance: machines may share the folder,
        # and have the same pids.
        temporary = final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        # Not mkstemp, whose files only their owner may read: the mode stays with the file under its final name.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)  # else Windows changes line ends
        handle = os.open(temporary, flags, 0o666)
        closed = False
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # the lock only tells ``sweep`` that the writer lives
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                direct_io.write(handle, chunks)
                os.fsync(handle)  # before it gets its name: a power cut could else leave the name without the bytes
                if _WINDOWS:  # where an open file can be neither renamed nor deleted
                    closed = True
                    os.close(handle)
            except OSError as error:
                error.filename = os.fspath(final)  # the system knows only the handle
                raise
            yield temporary  # the handle stays open, and locked, until the file has its name
        finally:
            if not closed:
                os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        _sync_folder(final.parent)

    def sweep(self, folder: str) -> None:
        """Remove temporary files whose writer is gone: killed ones leave them behind."""
        if fcntl is None:  # leftovers of killed writers stay
            return
        for path in (self.root / folder).glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < _STALE_SECONDS:
                    continue
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self.root / name, "rb", buffering=0) as file:
            left = (os.fstat(file.fileno()).st_size if end is None else end) - start
            file.seek(start)
            parts = []
            # One read gives 2 GiB at most, and may give less.
            while left > 0 and (part := file.read(min(left, _MOST_BYTES))):
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.root / name)

    def sizes(self, folder: str, prefix: str = "") -> dict[str, int]:
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / folder) as entries:
            for e in entries:
                if e.name.startswith(prefix) and not e.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):  # deleted since: others are at work, too
                        found[_joined(folder, e.name)] = e.stat().st_size
        return found

    def free(self) -> int | None:
        # The store may not be there yet: the nearest folder above it is on the same disk.
        there = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        return shutil.disk_usage(there).free

    def warm(self, folder: str) -> None:
        direct_io.warm({self.root / name: size for name, size in self.sizes(folder).items()})


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        # Not makedirs: a new folder, too, is safe only when the one above it is synced.
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    if _WINDOWS:  # which opens no folders, and has nothing to sync in them
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)


class Bucket:
    """Anything that fsspec reaches by URL: ``s3://``, ``gs://``, ``memory://``, …"""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_fs": None}  # file systems hold loops and sockets: each process makes its own

    @property
    def fs(self) -> Any:
        if self._fs is None:
            self._fs, _ = require("fsspec", "stores").core.url_to_fs(self.url)
        return self._fs

    def create(self, name: str, chunks: Chunks) -> bool:
        try:
            self.fs.pipe_file(f"{self.url}/{name}", b"".join(chunks), mode="create")
        except FileExistsError:
            return False
        except OSError:
            # S3 answers 412 to a conditional PUT that lost and 409 to two at once; fsspec has no error of its own.
            self.fs.invalidate_cache()
            if self.fs.exists(f"{self.url}/{name}"):
                return False
            raise
        return True

    def replace(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.url}/{name}", data)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.url}/{name}", start=start, end=end)
        return data

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.url}/{name}")

    def sizes(self, folder: str, prefix: str = "") -> dict[str, int]:
        # fsspec remembers listings: shards of other writers would never show.
        self.fs.invalidate_cache()
        where = f"{self.url}/{folder}".rstrip("/")
        try:
            if prefix and self.lists_parts:
                found = self.fs.find(where, detail=True, prefix=prefix).values()
            else:
                found = self.fs.ls(where, detail=True)
        except FileNotFoundError:
            return {}
        names = {e["name"].rsplit("/", 1)[-1]: int(e["size"]) for e in found if e["type"] == "file"}
        return {_joined(folder, name): size for name, size in names.items() if name.startswith(prefix)}

    @property
    def lists_parts(self) -> bool:
        # Those that hold objects can (S3, GCS, Azure); others would hand the word on to a listing that knows it not.
        find = getattr(self.fs, "_find", self.fs.find)
        return "prefix" in inspect.signature(find).parameters

    def free(self) -> int | None:
        return None

    def sweep(self, folder: str) -> None:
        pass  # a PUT that was broken off leaves nothing

    def warm(self, folder: str) -> None:
        pass
