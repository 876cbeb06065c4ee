"""Which layer to look at when nobody says: the last one whose map still shows where.

That is the last layer, in the order in which they end, whose output is a map of more than one place, and on more than
one place of which the score depends. For a convolutional network it is the end of the features; for a vision
transformer that reads out a class token it is the norm before the last attention: behind it, the patches do not count.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._cam.inputs import Subject, refuse_one_example
from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook._values.layout import Grids, Layout, infer
from torchhook.errors import LayoutError, SelectorError

# Layers that only pass on, thin out or mix what another layer made. Convolutions and activations are never named so.
_PASSIVE = re.compile(r"pool|drop|identity|flatten|permute|linear|softmax|embed|conv1d", re.IGNORECASE)


def watch_grids(grids: Grids, session: Session, image: Tensor) -> Grids:
    """See the grids of the convolutions; before anything else looks at them."""

    def looking_at(module: nn.Module) -> Look:
        def look(value: Any, call: int) -> None:
            refuse_one_example(module, value, image)
            grids.see(value)

        return look

    for module in filter(grids.concern, session.index.distinct.values()):
        site = Site(session.index.names(module)[0])
        session.look(Target(site, module), looking_at(module))
    return grids


def map_leaf(value: Any) -> str | None:
    """The address of the tensor in a layer's value that may be a map."""
    found = [(a, t) for a, t in tree.leaves(value) if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 3]
    return found[0][0] if found else None


def choose(model: nn.Module, index: Index, subject: Subject, score: Callable[[Any], Tensor]) -> str:
    """The address of the layer to look at."""
    session = Session(model, index=index, warn=False)
    grids = watch_grids(Grids(len(subject.size)), session, subject.image)
    ended: list[Site] = []
    alive: set[Site] = set()

    def passing(site: Site) -> Look:
        return lambda value, call: ended.append(site.but(call=call)) if _layout(value) is not None else None

    def going_back(site: Site) -> Look:
        def look(grad: Any, call: int) -> None:
            layout = _layout(grad)
            if layout is not None:
                places = layout.maps(tree.get(grad, map_leaf(grad) or "")).ne(0).any(1)
                if int(places.flatten(1).sum(1).max()) > 1:
                    alive.add(site.but(call=call))

        return look

    def _layout(value: Any) -> Layout | None:
        leaf = map_leaf(value)
        if leaf is None:
            return None
        try:
            layout = infer(tree.get(value, leaf).shape, subject.size, subject.examples, grids.seen)
        except LayoutError:
            return None
        return layout if math.prod(layout.grid) > 1 else None

    for module in index.distinct.values():
        site = Site(index.names(module)[0])
        # Not the model itself: it ends last, so that a segmentation model would always be explained by its own output.
        if site.path and is_callable(module) and not _is_passive(module):
            session.look(Target(site, module), passing(site))
            session.look(Target(site.but(port="grad"), module), going_back(site))
    with torch.enable_grad(), _differentiable(model, subject) as needed, session:
        scores = score(calling.call(model, subject.inputs)).sum()
        if needed and scores.requires_grad:
            # For the looks on the way; the gradients themselves are not wanted, and nobody's .grad is written to.
            torch.autograd.grad(scores, needed, allow_unused=True)
    if not ended:
        raise SelectorError(
            "no layer of this model gives a map of more than one place for this input. Name one with layer=…, and say "
            "how it is laid out with layout=… and grid=…"
        )
    # A head of zeros, as some models are born with, leaves nothing alive.
    candidates = [site for site in ended if site in alive] or ended
    # A layer that runs several times is named with its call: a map is made of one.
    calls = [site for site in ended if site.every_call == candidates[-1].every_call]
    return str(candidates[-1] if len(calls) > 1 else candidates[-1].every_call)


@contextlib.contextmanager
def _differentiable(model: nn.Module, subject: Subject) -> Iterator[list[Tensor]]:
    """Where autograd starts, so that gradients reach every layer: the inputs, or for token ids the parameters.

    Frozen parameters require gradients meanwhile.
    """
    starts = [t for t in tree.tensors(subject.inputs) if t.is_floating_point()]
    if not subject.image.is_floating_point():
        # An inference tensor cannot be made to require gradients.
        starts += [p for p in model.parameters() if p.is_floating_point() and p.is_leaf and not p.is_inference()]
    frozen = [t for t in starts if not t.requires_grad]
    try:
        for tensor in frozen:
            tensor.requires_grad_(True)
        yield starts
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def _is_passive(module: nn.Module) -> bool:
    # Only leaves: a block that is named after its pooling or embedding makes maps of its own.
    return not any(True for _ in module.children()) and _PASSIVE.search(type(module).__name__) is not None
