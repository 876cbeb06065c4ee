"""Devices by name."""

from __future__ import annotations

from typing import Any

import torch


def named(device: torch.device | str, keyword: str) -> torch.device:
    """The device that a user has named, or one sentence on what can be named.

    >>> named("cpu", "device")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
    # torch lists twenty kinds that hardly any build has, and nothing that could be meant.
    except (RuntimeError, TypeError) as error:
        meant = (
            " A GPU of NVIDIA or AMD is 'cuda', one of Apple 'mps'." if str(device).lower().startswith("gpu") else ""
        )
        raise ValueError(
            f"{keyword}={device!r} is no device: use 'cpu', 'cuda', 'cuda:1', 'mps' or a torch.device.{meant}"
        ) from error
    there = _count(found.type)
    if there is not None and (found.index or 0) >= there:
        known = ", ".join(repr(f"{found.type}:{number}") for number in range(there))
        have = f"there is {known}" if there else f"torch {torch.__version__} finds no such device here, 'cpu' is there"
        raise ValueError(f"{keyword}={str(device)!r} cannot be used: {have}.")
    return found


def _count(kind: str) -> int | None:
    """How many devices of a kind there are; ``None`` where there is nothing to count."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    # By what torch says of the kind: memory on it would start the device, and with it what cannot be forked any more.
    module: Any = None if kind in ("cpu", "meta") else getattr(torch, kind, None)
    if not hasattr(module, "is_available") or not hasattr(module, "device_count"):
        return None
    return int(module.device_count()) if module.is_available() else 0
