"""What a call of ``extract`` asks for, and what of that means nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract import engines, skips
from torchhook._extract.inputs import Part
from torchhook._extract.special_tokens import Drop
from torchhook._features.api import Store
from torchhook.errors import ExtractError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a call of ``extract`` asks for; its docstring says what each of these is."""

    model: nn.Module
    data: Any
    sites: Selector
    out: str | os.PathLike[str]
    batch_size: int | None
    transform: Transforms
    run_on: torch.device | str | None
    dtype: torch.dtype | None
    rows_per_shard: int | None
    shard_bytes: int | None
    ids: Part
    labels: Part
    lengths: Part
    drop_special: Drop
    input_fn: Callable[[Any], Any] | None
    engine: str
    workers: int | None
    resume: bool
    on_error: str
    nan: str
    progress: bool
    autocast: torch.dtype | bool | None
    engine_options: dict[str, Any]
    max_skipped: int | float | None = None
    retry_skipped: bool = False
    dry_run: bool = False

    @property
    def any_cut(self) -> bool:
        """Whether the call leaves open how rows are cut into shards."""
        return self.rows_per_shard is None and self.shard_bytes is None

    @property
    def replaces(self) -> bool:
        """Whether a store that is there is deleted. Ranks find none when they start, and then one of theirs."""
        return not self.resume and (self.engine != "torchrun" or engines.ranks()[1] == 1)

    @property
    def skip(self) -> bool:
        """Whether rows may be left out."""
        return self.on_error == "skip"


def check(request: Request) -> None:
    """Refuse options that mean nothing, before anything is loaded or run."""
    _one_of("on_error", request.on_error, ("raise", "skip"))
    _one_of("nan", request.nan, ("raise", "keep"))
    _one_of("engine", request.engine, ("local", "torchrun", "ray"))
    if request.rows_per_shard is not None and request.shard_bytes is not None:
        raise ValueError("give rows_per_shard or shard_bytes, not both.")
    for name in ("rows_per_shard", "shard_bytes", "batch_size"):
        number = getattr(request, name)
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: give a positive number.")
    if request.engine == "ray":
        # Here, and not after the first batch has been loaded and run.
        require("ray", "ray")
    elif request.engine_options:
        raise ValueError(f"engine_options={request.engine_options} are for engine='ray'.")
    if request.max_skipped is not None:
        skips.check(request.max_skipped)
        if not request.skip:
            raise ValueError(f"max_skipped={request.max_skipped} is for on_error='skip'.")
    if request.engine == "local" and not request.dry_run:
        engines.warn_of_others()
    if request.engine == "torchrun" and engines.ranks()[1] > 1 and request.retry_skipped:
        raise ExtractError(
            "retry_skipped=True: ranks would delete each other's shards. Call it once with engine='local'."
        )
    if request.engine == "torchrun" and engines.ranks()[1] > 1 and not request.resume and Store(request.out).manifest():
        raise ExtractError("resume=False: ranks would delete each other's shards. Delete the store before they start.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, allowed))}.")
