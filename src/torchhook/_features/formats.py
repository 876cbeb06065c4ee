"""``store.json`` of every version of TorchHook, in today's words, and the checksum that tells if it was altered.

Format 1 called the sites ``layers`` at first, and had no checksum; its shards do not say which run they belong to. The
shards of formats 1 and 2 have a CRC32, those of format 3 an XXH3.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "torchhook-features"
VERSION = 3


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, with a checksum of it.

    >>> sealed({"rows": 3})
    {'rows': 3, 'crc32': '48ce35c8'}
    """
    return {**data, "crc32": _crc(data)}


def checked(data: Any) -> dict[str, Any]:
    """What was ``sealed``; a ``ValueError`` if it was altered since."""
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}, and no object with a checksum")
    plain = {key: value for key, value in data.items() if key != "crc32"}
    if data.get("crc32") != _crc(plain):
        raise ValueError(f"its checksum is {_crc(plain)}, and it says {data.get('crc32')}: it was altered")
    return plain


def _crc(data: Mapping[str, Any]) -> str:
    # Of what it says, not of the bytes: it may be indented otherwise.
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"


def packed(entries: Sequence[Any]) -> bytes:
    """A list as a file with a checksum."""
    return json.dumps(sealed({"entries": entries})).encode()


def unpacked(data: bytes) -> list[Any]:
    """What was ``packed``; a ``ValueError`` or ``TypeError`` for anything else, as for a list without a checksum."""
    found: list[Any] = checked(json.loads(data))["entries"]
    return found


def current(data: dict[str, Any]) -> dict[str, Any]:
    """What a ``store.json`` of any version says, as one of today would; a ``ValueError`` if it cannot be known."""
    name, version = data.get("format"), data.get("version")
    if name != FORMAT or version not in range(1, VERSION + 1):
        known = f"{FORMAT} 1 to {VERSION}"
        raise ValueError(f"another format or version ({name} {version}, and this TorchHook knows {known})")
    if version == 1:
        plain = dict(data)
        # A flipped bit is found only in later ones; but a store cannot be read wrongly: shards know their columns.
        if "layers" in plain:
            plain["sites"] = plain.pop("layers")
        _check(plain)
    else:
        plain = checked(data)
    return {key: value for key, value in plain.items() if key != "format"}


def _check(plain: dict[str, Any]) -> None:
    """What a checksum would have told: numbers that are none, or that cannot be."""
    rows, per_shard = plain["rows"], plain["rows_per_shard"]
    if not (rows is None or _is_count(rows)) or not _is_count(per_shard) or per_shard == 0:
        raise ValueError(f"{rows} rows, {per_shard} in each shard")
    for column in plain["columns"]:
        if not isinstance(column["name"], str) or not all(map(_is_count, column["shape"])):
            raise ValueError(f"a column {column['name']} with rows of shape {column['shape']}")


def _is_count(size: Any) -> bool:
    return type(size) is int and size >= 0
