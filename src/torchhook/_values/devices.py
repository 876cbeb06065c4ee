"""Devices by name."""

from __future__ import annotations

import torch


def named(device: torch.device | str, keyword: str) -> torch.device:
    """The device that a user has named, or one sentence on what can be named.

    >>> named("cpu", "device")
    device(type='cpu')
    """
    try:
        return torch.device(device)
    # torch lists twenty kinds that hardly any build has, and nothing that could be meant.
    except (RuntimeError, TypeError) as error:
        meant = (
            " A GPU of NVIDIA or AMD is 'cuda', one of Apple 'mps'." if str(device).lower().startswith("gpu") else ""
        )
        raise ValueError(
            f"{keyword}={device!r} is no device: use 'cpu', 'cuda', 'cuda:1', 'mps' or a torch.device.{meant}"
        ) from error
