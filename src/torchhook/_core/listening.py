"""The gradient of one tensor *from here on*: of what becomes of it after this moment, and of nothing else.

A tensor hook tells what flows into a step of the graph, from all who ever used its result::

      before           here            from here on
                         │
    x.grad_fn ◀───── read│(inside the module that made x)
        ▲  ▲─────────────│── read
        │                │
        └────────────────│── write in place ◀── read

Two things have to be kept apart from what is asked for:

*Uses from before.* Most values have none: autograd numbers its steps, and if the step that made a value is the newest,
nobody has used it yet. Then a hook on the tensor itself is right (``listen``). Otherwise, and for what lives elsewhere
too (a module's own input, a parameter), the model is handed an alias, a view with a step of its own (``Alias``).

*Writes in place.* They take views, and our aliases with them, off the graph (pytorch#61519): what flows through the
write then arrives at the tensor that it is a view of. So that one is listened to as well, and told whether a write
came in between by a tensor without memory that shares the version counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchhook import _torch
from torchhook._core.hooks import TensorHandles, on_gradient, on_node
from torchhook._torch import sequence_number, version

TensorHook = Callable[[Tensor], Tensor | None]
"""Takes the gradient of a tensor, and may return another to go on with."""

_LONG = 64  # more views of views, or writes to one tensor, than anyone follows


def is_unused(tensor: Tensor) -> bool:
    """Whether nobody can have used a tensor yet, nor what it is a view of: their steps are the newest there are."""
    whole, newest = root(tensor), _torch.next_sequence_number()
    if tensor.grad_fn is None or whole.grad_fn is None or not newest:
        return False
    made, step = sequence_number(whole.grad_fn), tensor.grad_fn
    for views in range(_LONG):
        if sequence_number(step) == made:
            return made + views + 1 == newest
        if not step.next_functions or step.next_functions[0][0] is None:
            return False
        step = step.next_functions[0][0]
    return False


def listen(tensor: Tensor, hook: TensorHook, handles: TensorHandles) -> None:
    """Hand ``hook`` all that flows into a tensor."""
    whole = _torch.base(tensor) if counts_versions(tensor) else None
    if whole is None or whole.is_leaf or not whole.requires_grad or whole.dtype != tensor.dtype:
        handles.add(_hooked(tensor, hook))
        return
    written, part = Written(tensor), Part(tensor, whole)

    def at_view(grad: Tensor) -> Tensor | None:
        return None if written else hook(grad)  # it is only a part, and goes on to the whole

    def at_whole(grad: Tensor) -> Tensor | None:
        if not written:
            return None
        new = hook(part.of(grad))
        return None if new is None else part.put(grad, new)

    handles.add(_hooked(tensor, at_view), _hooked(whole, at_whole))


def _hooked(tensor: Tensor, hook: TensorHook) -> RemovableHandle:
    # After a write through another view, asking for the step of a view makes it anew and drops the hooks that were
    # there: asked for in the middle of registering one, that ends the process (pytorch#196459).
    _ = tensor.grad_fn
    return on_gradient(tensor, hook)


class Alias:
    """A view that is handed on in the place of a tensor, so that its gradient is told apart from that of others."""

    def __init__(self, tensor: Tensor, hook: TensorHook, handles: TensorHandles) -> None:
        with torch.enable_grad():  # it must stay on the graph, whoever runs the module
            self.tensor: Tensor | None = tensor.view_as(tensor)
        self._hook = hook
        self._handles = handles
        self._read: Tensor | None = None
        self._through_write: Tensor | None = None
        self._is_written = False
        handles.add(_hooked(self.tensor, self._at_alias))
        whole = root(self.tensor) if counts_versions(self.tensor) else self.tensor
        # Autograd lets nobody write to a view of a leaf that has a gradient.
        self._can_be_written = whole is not self.tensor and not whole.is_leaf and whole.dtype == tensor.dtype
        if self._can_be_written:
            self._part = Part(self.tensor, whole)
            self._before = version(self.tensor)
            self._step = sequence_number(whole.grad_fn), whole.output_nr
            handles.add(_hooked(whole, self._at_whole))

    def was_written(self) -> bool:
        """Whether the memory was written to since the alias was made."""
        return self._can_be_written and self.tensor is not None and version(self.tensor) != self._before

    def settle(self) -> None:
        """No more writes that count will come: follow the first that came, if one did, and let go of the memory."""
        if self.was_written() and self.tensor is not None and not self._is_written:
            found = _first_write(root(self.tensor), self._step)
            if found is not None:
                self._is_written = True
                node, places = found
                self._handles.add(on_node(node, lambda grads, _: self._at_write(grads, places)))
        self.tensor = None

    # What is read before the write and what flows through it arrive in any order, and both before the whole does.

    def _at_alias(self, grad: Tensor) -> Tensor | None:
        if not self._is_written:
            return self._hook(grad)
        self._read = grad
        return None

    def _at_write(self, grads: tuple[Tensor | None, ...], places: list[int]) -> None:
        for grad in (grads[place] for place in places):
            if grad is not None:
                known = self._through_write
                self._through_write = grad if known is None else known + grad

    def _at_whole(self, grad: Tensor) -> Tensor | None:
        (read, written), self._read, self._through_write = (self._read, self._through_write), None, None
        if not self._is_written or (read is None and written is None):
            return None
        through = None if written is None else self._part.of(written)
        here = through if read is None else read if through is None else read + through
        assert here is not None
        new = self._hook(here)
        return None if new is None else self._part.put(grad, self._part.of(grad) - here + new)


def _first_write(whole: Tensor, step: tuple[int, int]) -> tuple[Any, list[int]] | None:
    """The write whose input is the result of ``step``, and where among its inputs that is."""
    node = whole.grad_fn
    for _ in range(_LONG):
        edges = () if node is None else node.next_functions
        places = [i for i, (fn, place) in enumerate(edges) if fn is not None and _is_step(fn, place, step)]
        if places:
            return node, places
        # Autograd puts the tensor that is written to first.
        node = edges[0][0] if edges else None
    return None


def _is_step(node: Any, place: int, step: tuple[int, int]) -> bool:
    return place == step[1] and sequence_number(node) == step[0]


def root(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself."""
    found = _torch.base(tensor)
    return tensor if found is None else found


def counts_versions(tensor: Tensor) -> bool:
    """Plain tensors do: a wrapper has no memory of its own, and inference mode keeps no count."""
    return type(tensor) is Tensor and not tensor.is_inference() and not _torch.is_wrapped(tensor)


class Written:
    """True once a tensor's memory is written to; keeps nothing of it alive."""

    def __init__(self, tensor: Tensor) -> None:
        # A tensor without memory that shares the version counter.
        self._witness = tensor.detach()
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._before = version(tensor)

    def __bool__(self) -> bool:
        return version(self._witness) != self._before


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

    @property
    def _is_all(self) -> bool:
        return self._view == (*self._whole, 0)

    def _laid_out(self, grad: Tensor) -> Tensor:
        size, stride = self._whole
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
