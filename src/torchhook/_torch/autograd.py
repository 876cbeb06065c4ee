"""The backward pass: which one runs, and in which order its steps were made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from torchhook._torch.finding import find, missing

current_node: Callable[[], Any] = find("_C._current_autograd_node", lambda: None)
"""The step of the backward pass that runs in this thread, if one does."""

torch_task: Callable[[], int] = find("_C._current_graph_task_id", lambda: -1 if current_node() is None else 0)
"""As ``graph_task``, by torch's own count: -1 means surely none."""
ended_tasks: set[int] = set()
"""Backward passes that torch counts as running while what was to be called after them runs."""


def graph_task() -> int:
    """The backward pass that is running in this thread; -1 for none."""
    return -1 if (task := torch_task()) in ended_tasks else task


next_sequence_number: Callable[[], int] = find("_C._autograd._get_sequence_nr", lambda: 0)
"""The number of the next step that autograd will note in this thread."""

_sequence_number = missing("Node._sequence_nr", "to know the order of the backward pass")


def sequence_number(node: Any) -> int:
    """Autograd numbers its steps in the order in which they are made."""
    found = getattr(node, "_sequence_nr", None)
    return _sequence_number() if found is None else int(found())


def in_dual_level() -> bool:
    """Whether tensors may carry tangents (``torch.autograd.forward_ad``); where nobody knows, they may."""
    return getattr(forward_ad, "_current_level", 0) >= 0


saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    find("_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: (None, None)), True
)
"""The innermost hooks on what autograd saves; where nobody knows, there may be some."""


def after_backward(function: Callable[[], None]) -> None:
    """From inside a gradient hook: call ``function`` once the backward pass that is running has ended."""
    find("_execution_engine.queue_callback", _no_queue, torch.autograd.Variable)(function)


_no_queue = missing("Variable._execution_engine", "to see the gradients of several tensors together")
