"""Views and writes in place: what a tensor is a view of, whether it was written to, and by which step of the graph.

Torch counts the writes to a piece of memory, and all views share the count. A write that autograd sees makes a new
step, whose input is the tensor as it was; the tensor, and every view of it that is read from then on, comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._torch import sequence_number, version

TensorHook = Callable[[Tensor], Tensor | None]
"""Takes the gradient of a tensor, and may return another to go on with."""

Step = tuple[int, int]
"""A step of the graph by its number, and which of its results."""

LONG = 64
"""More views of views, or writes to one tensor, than anyone follows."""


def first_write(whole: Tensor, step: Step) -> tuple[Any, list[int]] | None:
    """The write whose input is the result of ``step``, and where among its inputs that is."""
    node = whole.grad_fn
    for _ in range(LONG):
        edges = () if node is None else node.next_functions
        places = [i for i, (fn, place) in enumerate(edges) if fn is not None and (sequence_number(fn), place) == step]
        if places:
            return node, places
        # Autograd puts the tensor that is written to first.
        node = edges[0][0] if edges else None
    return None


def step_of(tensor: Tensor) -> Step | None:
    """The step that made a tensor, and where among its results it is; ``None`` for a leaf."""
    return None if tensor.grad_fn is None else (sequence_number(tensor.grad_fn), tensor.output_nr)


def root(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself."""
    found = _torch.base(tensor)
    return tensor if found is None else found


def counts_versions(tensor: Tensor) -> bool:
    """Plain tensors do: a wrapper has no memory of its own, and inference mode keeps no count."""
    return type(tensor) is Tensor and not tensor.is_inference() and not _torch.is_wrapped(tensor)


class Written:
    """Whether a tensor's memory was written to since now; keeps nothing of it alive."""

    def __init__(self, tensor: Tensor) -> None:
        # A tensor without memory that shares the version counter.
        self._witness = tensor.detach()
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._before = version(tensor)
        self._known: tuple[int, bool] = -1, False

    def before_backward(self) -> bool:
        """The same answer all through a backward pass: recomputed segments write again."""
        task = _torch.graph_task()
        if self._known[0] != task:
            self._known = task, version(self._witness) != self._before
        return self._known[1]


class Sum:
    """What has arrived of a gradient that comes in parts."""

    def __init__(self) -> None:
        self._known: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        self._known = grad if self._known is None else self._known + grad

    def take(self) -> Tensor | None:
        known, self._known = self._known, None
        return known


class Part:
    """Where a view lies in the tensor that it is a view of."""

    def __init__(self, view: Tensor, whole: Tensor) -> None:
        self._whole = tuple(whole.size()), whole.stride()
        self._view = tuple(view.size()), view.stride(), view.storage_offset() - whole.storage_offset()

    def of(self, grad: Tensor) -> Tensor:
        """What belongs to the view of a gradient of the whole."""
        return grad if self._is_all else self._laid_out(grad).as_strided(*self._view)

    def put(self, grad: Tensor, new: Tensor) -> Tensor:
        """The gradient of the whole with another for the view."""
        if self._is_all:
            return new
        whole = self._laid_out(grad)
        whole.as_strided(*self._view).copy_(new)
        return whole

    def exchange(self, hook: TensorHook, here: Tensor | None, grad: Tensor, arrived: Tensor) -> Tensor | None:
        """The gradient of the whole with what ``hook`` makes of ``here``, what flows to the view in one way of many."""
        if here is None:
            return None
        if grad is not arrived:  # those who came later have changed it
            here = here + self.of(grad - arrived)
        new = hook(here)
        return None if new is None else self.put(grad, self.of(grad) - here + new)

    @property
    def _is_all(self) -> bool:
        return self._view == (*self._whole, 0)

    def _laid_out(self, grad: Tensor) -> Tensor:
        size, stride = self._whole
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
