"""A forward pass that ends early: what others do when forward returns, which it then never does.

FSDP takes gathered weights apart again there, and accelerate takes back what it loaded; DDP and FSDP1 make ready for
the backward pass.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchhook._core import offload
from torchhook._core.index import Index, within
from torchhook._core.scope import Stop
from torchhook._torch import sharded
from torchhook._values import tree
from torchhook.errors import SessionError


def refusal(index: Index) -> Callable[[], None]:
    """What is called before a forward pass ends early with a value on its graph: refuses where that loses gradients.

    DDP and FSDP1 make ready for the backward pass when forward returns. Without that, each rank of DDP would keep the
    gradients of its own batch without a word.
    """

    def check() -> None:
        kind = _ranks_wrapper(index)
        if kind is not None and torch.is_grad_enabled():
            raise SessionError(
                f"stop=True ends the forward pass of a {kind} before it is ready for a backward pass: the gradients "
                "would not be put together over the ranks. Call it under torch.no_grad(), leave out stop=True, or put "
                f"the {kind} around th.FeatureExtractor(model, names, stop=True)."
            )

    return check


def _ranks_wrapper(index: Index) -> str | None:
    """The kind of what is around the model itself and puts gradients together over the ranks."""
    module = index.given
    while module is not index.root:  # each of them holds one module that matters, and has its name
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            return type(module).__name__
        module = within(module)
    return None


def settle(index: Index, stop: Stop, kept: Callable[[], Iterable[Any]]) -> None:
    """Leave the weights of a model as after a whole forward pass. ``kept`` are the values that it was ended for."""
    if not (offload.may_have_loaded() or sharded.are_ranks()):  # as mostly: the frames need not be looked through
        return
    frames = [frame for frame, _ in traceback.walk_tb(stop.__traceback__)]
    offload.take_back(frames)
    if sharded.are_ranks():
        # Also who is around the model that is listened to, if the block called that.
        around = [frame.f_locals.get("self") for frame in frames]
        modules = [*(module for module in around if isinstance(module, nn.Module)), *index.given.modules()]
        # A gradient comes back through what was kept, as it would through the output.
        sharded.end_forward(modules, lambda: tree.tensors(list(kept())))
