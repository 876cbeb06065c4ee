"""``store.json`` of every version of TorchHook, in today's words, and the checksum that tells if one was altered.

Format 1 called the sites ``layers`` at first, and had no checksum; its shards do not say which run they belong to.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

FORMAT = "torchhook-features"
VERSION = 2


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, with a checksum of it.

    >>> sealed({"rows": 3})
    {'rows': 3, 'crc32': '48ce35c8'}
    """
    return {**data, "crc32": _crc(data)}


def checked(data: Mapping[str, Any]) -> dict[str, Any]:
    """What was ``sealed``; a ``ValueError`` if it was altered since."""
    plain = {key: value for key, value in data.items() if key != "crc32"}
    if data.get("crc32") != _crc(plain):
        raise ValueError(f"its checksum is {_crc(plain)}, and it says {data.get('crc32')}: it was altered")
    return plain


def _crc(data: Mapping[str, Any]) -> str:
    # Of what it says, not of the bytes: it may be indented otherwise.
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"


def current(data: dict[str, Any]) -> dict[str, Any]:
    """What a ``store.json`` of any version says, as one of today would say it, or a ``ValueError``."""
    version = data.get("version")
    if data.get("format") != FORMAT or version not in range(1, VERSION + 1):
        raise ValueError(
            f"another format or version ({data.get('format')} {version}, and this TorchHook knows {FORMAT} 1 to "
            f"{VERSION})"
        )
    if version == 1:
        plain = dict(data)
        # A flipped bit is found only in later ones; but a store cannot be read wrongly: shards know their columns.
        if "layers" in plain:
            plain["sites"] = plain.pop("layers")
    else:
        plain = checked(data)
    return {key: value for key, value in plain.items() if key != "format"}
