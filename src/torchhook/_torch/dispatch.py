"""Modes that hear every operation on a tensor, as a selective checkpoint has them on while its segment runs.

It counts the operations of each kind, keeps the results of some, and hands them out in the same order when the segment
is recomputed. What a hook computes once, in the first run, would be counted with them: the model would then be given
the hook's results in place of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchhook._torch.checkpoints import in_checkpoint
from torchhook._torch.finding import find, missing
from torchhook._torch.memory import version
from torchhook.errors import SessionError

P = ParamSpec("P")
R = TypeVar("R")

_purpose = "to keep its own work out of selective checkpoints"
_found: Callable[[], list[Any]] | None = find("utils._python_dispatch._get_current_dispatch_mode_stack", None)
_stack = missing("_get_current_dispatch_mode_stack", _purpose) if _found is None else _found
# Where nobody can tell, there may be some in every checkpoint, and what needs to know them is refused there alone.
dispatch_modes: Callable[[], int] = find(
    "_C._len_torch_dispatch_stack", lambda: int(in_checkpoint()) if _found is None else len(_found())
)
"""How many of these modes are on in this thread: mostly none, and nothing is cheaper to ask."""
_pop = find("_C._pop_torch_dispatch_stack", missing("_pop_torch_dispatch_stack", _purpose))
_push = find("_C._push_on_torch_dispatch_stack", missing("_push_on_torch_dispatch_stack", _purpose))


@contextlib.contextmanager
def out_of_checkpoints() -> Iterator[None]:
    """What is done in this block is no part of the checkpointed segment that runs, if one does: neither by what it
    computes nor by what autograd saves for it. Modes that trace, or that make tensors fake, stay on."""
    if not in_checkpoint():
        yield
        return
    before = _stack() if dispatch_modes() else []
    try:
        for mode in reversed(before):
            if getattr(mode, "_mode_key", None) is not None:  # torch's own, which lie below all others
                break
            _pop(None)
        with torch.autograd.graph.saved_tensors_hooks(_noted, _unchanged):
            yield
    finally:
        for mode in before[dispatch_modes() :] if before else ():
            _push(mode)


def kept_out(function: Callable[P, R]) -> Callable[P, R]:
    """A function that looks at what a model computes, so that what it does itself is no part of a checkpoint."""

    @functools.wraps(function)
    def looks(*args: P.args, **kwargs: P.kwargs) -> R:
        if not dispatch_modes():
            return function(*args, **kwargs)
        with out_of_checkpoints():
            return function(*args, **kwargs)

    return looks


# Autograd looks for writes in what it saves itself, and not in what hooks have saved for it.


def _noted(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, version(tensor)


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    tensor, known = saved
    if version(tensor) != known:
        raise SessionError(
            f"the gradient of a kept value needs a tensor of shape {tuple(tensor.shape)} that was written to since, as "
            "by an in-place layer: have the transform copy what it is given first, by value.clone()."
        )
    return tensor
