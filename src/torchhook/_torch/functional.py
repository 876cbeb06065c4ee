"""Modes that hear functional calls, and what is inside of fused ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchhook._torch.finding import find, missing

unheard: Callable[[], contextlib.AbstractContextManager[Any]] = find("_C.DisableTorchFunction", contextlib.nullcontext)
"""No ``TorchFunctionMode`` hears what is done in this block; where that is gone, the mode has to ignore it itself."""


def mode_is_on(mode: TorchFunctionMode) -> bool:
    """Whether a mode is on torch's stack, at any depth."""
    above = modes_on()
    # On top, as nearly always.
    return above > 0 and (_mode_at(above - 1) is mode or any(_mode_at(i) is mode for i in range(above)))


def turn_off(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, wherever it is: others may have come after it."""
    if (on := modes_on()) and _mode_at(on - 1) is mode:  # as nearly always
        _pop_mode()
        if on == 1:
            return
    above = []
    while mode_is_on(mode):
        top = _pop_mode()
        if top is not mode:
            above.append(top)
    for other in reversed(above):
        _push_mode(other)


_stack = "to listen to operations"
modes_on: Callable[[], int] = find("_C._len_torch_function_stack", missing("_len_torch_function_stack", _stack))
"""How many modes are on torch's stack."""

_mode_at = find("_C._get_function_stack_at", missing("_get_function_stack_at", _stack))
_pop_mode = find("_C._pop_torch_function_stack", missing("_pop_torch_function_stack", _stack))
_push_mode = find("_C._push_on_torch_function_stack", missing("_push_on_torch_function_stack", _stack))
turn_on: Callable[[TorchFunctionMode], None] = _push_mode
"""Put a mode on torch's stack, as its own ``__enter__`` does in more steps."""


def attention_weights(arguments: Iterable[Any]) -> Tensor:
    """The weights of the fused call of ``nn.MultiheadAttention``, given its arguments."""
    fused = find("_native_multi_head_attention", missing("_native_multi_head_attention", "to compute its maps"))
    found: Tensor = fused(*arguments)[1]
    return found


def materialized(bias: Any, device: torch.device) -> Tensor:
    """A causal bias of ``torch.nn.attention.bias`` as numbers."""
    make = getattr(bias, "_materialize", missing("CausalBias._materialize", "to read a causal bias"))
    found: Tensor = make(device)
    return found
