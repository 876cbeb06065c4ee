"""The one run that is looked at: numbers and pictures of every layer, and the gradients of the score."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._report import pictures
from torchhook._report.facts import Call, LayerFacts
from torchhook._report.layout import Layouts
from torchhook._report.measure import numbers
from torchhook._report.score import Score, score
from torchhook._values import tree
from torchhook._values.elements import dtype_name
from torchhook._values.moments import rms
from torchhook._values.subclasses import is_part, is_partial, local
from torchhook._values.targets import Goal
from torchhook._values.tree import Inputs

_CALLS = 4  # of a layer that runs hundreds of times, the first few are enough to look at


class View:
    """How much of each layer is shown: less where there are many, so that the page stays small."""

    def __init__(self, layers: int, patches: bool) -> None:
        self.patches = patches
        self.reads = False
        """Whether the input is tokens."""
        # With the mean, they are two rows of eight in the sprite, one, or half of one.
        self.maps = 15 if layers < 400 else 7 if layers < 900 else 3
        self.side = 56 if layers < 300 else 40 if layers < 600 else 28
        self.heads = 64 if layers < 600 else 40
        self.tokens = 0
        """The longest sequence that was seen."""
        self.parts: dict[str, None] = {}
        """Layers of whose output only a part is on this rank."""


def observe(
    model: nn.Module,
    index: Index,
    given: Inputs,
    target: Goal,
    gradients: bool,
    layers: list[LayerFacts],
    numbers_of: dict[int, int],
    view: View,
    notes: list[str],
) -> tuple[Any, Score, list[float]]:
    """Run the model, fill in the layers, and return its output, its score, and how much that hangs on each token."""
    # No warning of what never ran: it is a finding on the page.
    session = Session(model, index=index, warn=False)
    layouts = Layouts(given, view.patches)
    sums: list[float] = []
    order = itertools.count()
    for key, number in numbers_of.items():
        module = index.distinct[key]
        if is_callable(module):
            site, looker = Site(layers[number].path), _Looker(layers[number], module, view, layouts, order, sums)
            session.look(Target(site, module), looker.value)
            if gradients:
                session.look(Target(site.but(port="grad"), module), looker.gradient)
    with torch.set_grad_enabled(gradients), session as recording:
        leaves, inputs = _differentiable(given) if gradients else ([], tree.map_tensors(Tensor.clone, given))
        # The backward pass is inside as well: gradients are seen only while the session is open.
        with _some_gradient(model, leaves, gradients):
            output = calling.called(model, inputs.args, inputs.kwargs)
            found = score(output, target, _examples(given))
            if gradients:
                _backward(index, found, leaves, layers, numbers_of, notes)
    # Afterwards, since a session works out why something never ran when it closes.
    for layer in layers:
        if layer.runs and not layer.ran and layer.shared_with is None:
            why = recording.missing.get(str(Site(layer.path)), "the model did not call it.")
            layer.idle = _harmless(index, layer)
            layer.silent = "" if layer.idle else why
    return output, found, sums


def _harmless(index: Index, layer: LayerFacts) -> str:
    """Why it changes nothing that a layer never ran; nothing where it may."""
    module = index.modules[layer.path]
    # By name: libraries have dropouts of their own.
    if "drop" in layer.type.lower() and not layer.parameters:
        rate = "takes its rate and not the layer" if module.training else "does without it"
        return f"a dropout that fused attention {rate}; in evaluation mode it is the identity anyway."
    if isinstance(module, nn.Identity):
        return "an identity changes nothing."
    if isinstance(index.modules.get(layer.path.rpartition(".")[0]), nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weights without calling it (pytorch#78109)."
    return ""


def _examples(given: Inputs) -> int:
    return next((tensor.size(0) for tensor in tree.tensors(given) if tensor.dim()), 1)


def _backward(
    index: Index,
    found: Score,
    leaves: list[Tensor],
    layers: list[LayerFacts],
    numbers_of: dict[int, int],
    notes: list[str],
) -> None:
    if found.value is None or not found.value.requires_grad:
        why = found.text if found.value is None else "the output does not depend on anything that requires one"
        notes.append(f"No gradients: {why}.")
        return
    # A tied parameter is there once for each owner, and autograd answers as often.
    owned = [
        (numbers_of[key], name, tensor)
        for key, module in index.distinct.items()
        for name, tensor in module._parameters.items()
        if tensor is not None and tensor.requires_grad
    ]
    # The inputs are asked for though nobody reads the answer: autograd goes no further than it must, and the layers of
    # a frozen model would see no gradient.
    # Not backward(): that would write to the .grad of the user's parameters.
    grads = torch.autograd.grad(found.value, [*leaves, *(t for _, _, t in owned)], allow_unused=True)
    for (number, name, _), grad in zip(owned, grads[len(leaves) :], strict=True):
        for weight in layers[number].weights:
            if weight.name == name:
                weight.gradient = rms(grad)


def _differentiable(given: Inputs) -> tuple[list[Tensor], Inputs]:
    """Copies of the inputs that gradients reach; not the leaves themselves, which a model may not overwrite."""
    leaves: list[Tensor] = []

    def prepared(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()

    return leaves, tree.map_tensors(prepared, given)


@contextlib.contextmanager
def _some_gradient(model: nn.Module, leaves: list[Tensor], gradients: bool) -> Iterator[None]:
    """A frozen model on tokens has nothing that requires a gradient: let its parameters, for this run."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and p.is_leaf and not p.is_inference()]
    if not gradients or leaves or any(p.requires_grad for p in frozen):
        frozen = []
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Looker:
    """Takes the numbers and pictures of what passes one layer, on the spot: nothing of it is kept."""

    def __init__(
        self,
        layer: LayerFacts,
        module: nn.Module,
        view: View,
        layouts: Layouts,
        order: Iterator[int],
        sums: list[float],
    ) -> None:
        self._layer = layer
        self._module = module
        self._view = view
        self._layouts = layouts
        self._order = order
        self._sums = sums

    def value(self, value: Any, call: int) -> None:
        self._layer.ran = call + 1
        text = tree.describe(value)
        if text not in self._layer.outputs:
            self._layer.outputs.append(text)
        if call >= _CALLS:
            return
        tensors = list(tree.tensors(value))
        leaf, whole = _main(value)
        tensor = None if whole is None else _here(whole)
        if whole is not None and is_part(whole):
            self._view.parts[self._layer.path] = None
        seen = Call(
            shape=text,
            dtype="/".join(dict.fromkeys(dtype_name(t.dtype) for t in tensors)) or "-",
            device="/".join(dict.fromkeys(str(t.device) for t in tensors)) or "-",
            # A sparse tensor raises when asked for its bytes.
            nbytes=sum(t.nbytes for t in tensors if t.layout == torch.strided and not t.is_nested),
            order=next(self._order),
            leaf=leaf,
        )
        if tensor is not None:
            if tensor.dim() == 3 and not tensor.is_nested:
                self._view.tokens = max(self._view.tokens, tensor.shape[1])
            # Gradients are on in this run, and would follow the statistics too.
            with torch.no_grad():
                layout = self._layouts.of(self._module, tensor)
                seen.value = numbers(tensor, layout)
                if seen.value is not None and not tensor.is_nested:
                    seen.maps = pictures.feature_maps(
                        tensor, layout, self._view.maps, self._view.side, self._view.reads
                    )
        self._layer.calls.append(seen)

    def gradient(self, value: Any, call: int) -> None:
        if call >= len(self._layer.calls):
            return
        seen = self._layer.calls[call]
        # Of the same part as the numbers beside it: not every tensor of a value has a gradient.
        parts = [t for address, t in tree.leaves(value) if address == seen.leaf and isinstance(t, Tensor)]
        tensor = _here(parts[0]) if parts else None
        if tensor is None:
            return
        with torch.no_grad():
            seen.gradient = numbers(tensor, self._layouts.of(self._module, tensor))
            if tensor.dim() == 3:
                # Gradients arrive last layer first: what stays is the one nearest to the input.
                self._sums[:] = tensor[0].float().norm(dim=-1).tolist()


def _main(value: Any) -> tuple[str, Tensor | None]:
    """The first floating-point tensor of a value, and its address in it."""
    found = [(address, leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    floats = [(a, t) for a, t in found if t.is_floating_point() or t.is_quantized]
    return next(iter(floats or found), ("", None))


def _here(tensor: Tensor) -> Tensor:
    # Of a DTensor, the part on this rank; summands are no values, and are left as what nobody can read.
    return tensor if is_partial(tensor) else local(tensor)
