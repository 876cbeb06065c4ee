"""``cam``: one forward pass in which autograd starts afresh at the layer, one backward pass to it, one formula."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._cam import perturb
from torchhook._cam.inputs import Subject, subject, told_to_fit
from torchhook._cam.layer_choice import choose, map_leaf, watch_grids
from torchhook._cam.methods import BY_GRADIENT, METHODS, eigencam, known_method, weighted
from torchhook._cam.result import CAM, stretch, upsample
from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._layers.api import untrained
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook._values.layout import Grids, Layout, infer, known_kind
from torchhook._values.targets import Goal, Labels, Scores, known_labels, name_of, torchvision_labels
from torchhook.errors import AmbiguousCallError, LayoutError, NeverRanError, SelectorError

__all__ = ["CAM", "METHODS", "cam", "known_method"]

Reshape = Callable[[Tensor], Tensor]


def cam(
    model: nn.Module,
    inputs: Any,
    target: Goal = None,
    layer: Selector | None = None,
    method: str = "gradcam",
    *,
    layout: str | Reshape | None = None,
    grid: Sequence[int] | None = None,
    batch: int = 32,
    channels: int | None = None,
    labels: Labels | None = None,
    progress: bool = True,
) -> CAM:
    """Where in its input the model saw the target: a class activation map for each example.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> result = cam(model, torch.randn(1, 3, 8, 8), target=1)
    >>> result.map.shape, result.layer
    (torch.Size([1, 8, 8]), '1')

    The model runs in evaluation mode and is left undisturbed: its modes, buffers, parameters' ``.grad`` and hooks, and
    the process's random numbers, are as before afterwards.

    Args:
        model: Any module.
        inputs: A tuple is the positional arguments, a dict the keyword arguments, ``th.Inputs(args, kwargs)`` both,
            anything else the one argument. The map is of the image, signal, volume or token ids among them.
        target: A class, a class for each example, or a function of the model's output that returns one number for each
            example; ``None`` is the class that the model predicts, for a language model at the last token.
        layer: One site, by any selector. Without it, the last layer is taken whose map the score depends on in more
            than one place, and the result says which.
        method: ``"gradcam"``, ``"gradcam++"``, ``"hirescam"``, ``"layercam"``, ``"xgradcam"``, ``"eigencam"``,
            ``"scorecam"`` or ``"ablationcam"``. The last two run the model once for each channel.
        layout: How the layer's output is laid out, where what is inferred is wrong: ``"channels_first"``,
            ``"channels_last"``, ``"tokens"``, or a function that returns batch × channels × grid.
        grid: The sizes of the grid, where what is inferred is wrong.
        batch: So many channels at a time, for Score-CAM and Ablation-CAM.
        channels: So many of the strongest channels only, for Score-CAM and Ablation-CAM.
        labels: The names of the classes: a list, or a dict by number. Without them, those of a transformers config, or
            of torchvision's own weights for a trained model of its own with as many classes.
        progress: Show a progress bar, for Score-CAM and Ablation-CAM.
    """
    formula = known_method(method)
    index = Index(model)
    known = None if layer is None else _one(index, layer)  # now: a wrong name costs no forward pass
    chunks = perturb.Chunks(batch, channels, progress)
    with _quiet(model):
        # In here: what is cloned in the caller's inference mode would be an inference tensor again.
        shown = subject(inputs)
        with told_to_fit(index, shown):
            site = known or _one(index, choose(model, index, shown, _first_score(target, shown.examples)))
            seen = _look(model, index, site, shown, target, formula in BY_GRADIENT)
        reading = _reading(seen, shown, layout, grid)
        maps = _maps(reading, seen.activation)
        if maps.dim() > 2 and math.prod(maps.shape[2:]) == 1:
            raise _one_place(site, maps, lambda: choose(model, index, shown, _first_score(target, shown.examples)))
        if formula in BY_GRADIENT:
            raw = BY_GRADIENT[formula](maps, _maps(reading, _gradient(seen)))
        elif formula == "eigencam":
            raw = eigencam(maps)
        elif formula == "scorecam":
            raw = weighted(maps, perturb.score_weights(model, shown, _maskable(seen, shown), maps, chunks))
        else:
            if not isinstance(reading, Layout):
                raise LayoutError(
                    "ablationcam sets channels to zero, and a function does not say where they are: "
                    "use layout='channels_first', 'channels_last' or 'tokens'."
                )
            weights = perturb.ablation_weights(
                model, index, seen.target, shown, seen.score, seen.scores, reading, seen.leaf, maps, chunks
            )
            raw = weighted(maps, weights)
        found = stretch(upsample(raw.relu(), shown.size))
    said = seen.score.classes if seen.score.classes is not None else getattr(target, "__name__", repr(target))
    how = str(reading) if isinstance(reading, Layout) else f"by {getattr(reading, '__name__', repr(reading))}"
    names = labels if labels is not None else seen.labels
    named = None if isinstance(said, str) or names is None else [name_of(label, names) for label in said]
    return CAM(found, raw, site.site, known is None, said, seen.scores.detach(), formula, how, named)


def _one(index: Index, layer: Selector) -> Target:
    targets = resolve(index, layer)
    if len(targets) > 1:
        listed = ", ".join(repr(target.site.shown) for target in targets[:4])
        raise SelectorError(f"layer={layer!r} chooses {len(targets)} sites: {listed}, … A map is made of one.")
    if targets[0].tensor is not None or targets[0].site.port not in ("output", "input"):
        raise SelectorError(
            f"layer={layer!r}: a map is made of what a layer gives or takes, not of a parameter or a gradient."
        )
    return targets[0]


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, whatever the caller's gradient mode; everything as before afterwards."""
    # In this order: leaving inference mode turns gradients on.
    with torch.inference_mode(False), torch.no_grad(), calling.undisturbed(model), calling.evaluating(model):
        yield


def _first_score(target: Goal, examples: int) -> Callable[[Any], Tensor]:
    return lambda output: Scores(target, output, examples)(output)


class _Seen:
    """What one forward pass showed of the layer."""

    def __init__(self, target: Target, dimensions: int, gradients: bool) -> None:
        self.target = target
        self._gradients = gradients
        self.leaf = ""
        self.grids = Grids(dimensions)
        self.values: dict[int, Tensor] = {}
        self.score: Scores
        self.scores: Tensor
        self.labels: Labels | None = None

    @property
    def activation(self) -> Tensor:
        return next(iter(self.values.values()))

    def begin(self, value: Any, site: Site) -> Any:
        """Let autograd start here: frozen parameters, integer inputs and earlier layers do not matter then."""
        leaf = map_leaf(value)
        if leaf is None:
            raise LayoutError(
                f"{site.shown}: {tree.describe(value)} holds no map. Choose a layer whose output is batch × channels × "
                "grid, batch × grid × channels or batch × tokens × channels."
            )
        self.leaf = leaf
        return tree.put(value, leaf, lambda tensor: self._begin(tensor, site.first_call))

    def _begin(self, tensor: Tensor, call: int) -> Tensor:
        # The model may have turned gradients off around this layer; the graph starts here all the same.
        with torch.set_grad_enabled(self._gradients):
            start = self.values[call] = tensor.detach().clone().requires_grad_(self._gradients)
            # The model goes on with a copy: a layer that works in place must leave the activation alone.
            return start.clone()


def _look(model: nn.Module, index: Index, target: Target, shown: Subject, goal: Goal, gradients: bool) -> _Seen:
    seen = _Seen(target, len(shown.size), gradients)
    session = Session(model, index=index, warn=False)
    session.edit(target, seen.begin)
    # A second time after choose: the layer may have been named, and tokens are laid out by the grids of other layers.
    watch_grids(seen.grids, session, shown.image)
    with torch.set_grad_enabled(gradients), session as recording:
        output = calling.call(model, shown.inputs)
        # Kept for the trials that follow: the class that is explained must be the one of the unchanged input.
        seen.score = Scores(goal, output, shown.examples)
        seen.scores = seen.score(output)
    if not seen.values:
        cause = recording.missing.get(str(target.site), "it was not called.")
        raise NeverRanError(f"layer {target.site.shown!r} never ran: {cause}")
    if len(seen.values) > 1:
        first, last = (target.site.but(call=call).shown for call in (0, max(seen.values)))
        raise AmbiguousCallError(
            f"layer {target.site.shown!r} ran {len(seen.values)} times: say which, from {first!r} to {last!r}."
        )
    seen.labels = _class_names(index, output)
    return seen


def _class_names(index: Index, output: Any) -> Labels | None:
    found = known_labels(index.root)
    theirs = torchvision_labels(index.root, output) if found is None else None
    # The classes of random weights mean nothing.
    return theirs if theirs is not None and not untrained(index) else found


def _gradient(seen: _Seen) -> Tensor:
    gradient: Tensor | None = None
    if seen.scores.requires_grad:
        # Not backward, which writes to .grad. One pass serves all: in evaluation mode, no example touches another.
        (gradient,) = torch.autograd.grad(seen.scores, seen.activation, torch.ones_like(seen.scores), allow_unused=True)
    if gradient is None:
        raise SelectorError(
            f"layer {seen.target.site.shown!r}: the score does not depend on it by any way that autograd can follow. "
            "Choose another layer; if the model turns gradients off inside, one behind that."
        )
    return gradient


def _reading(seen: _Seen, shown: Subject, layout: str | Reshape | None, grid: Sequence[int] | None) -> Layout | Reshape:
    if callable(layout):
        return layout
    kind = known_kind(layout, " or a function")
    try:
        return infer(seen.activation.shape, shown.size, shown.examples, seen.grids.seen, kind, grid)
    except LayoutError as error:
        raise LayoutError(f"layer {seen.target.site.shown!r}: {error}") from None


def _maps(reading: Layout | Reshape, value: Tensor) -> Tensor:
    """Batch × channels × grid, in float32 at least: the cube of a half-precision gradient is zero."""
    maps = reading.maps(value.detach()) if isinstance(reading, Layout) else reading(value.detach())
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _one_place(site: Target, maps: Tensor, choose_another: Callable[[], str]) -> LayoutError:
    """A map of one place is the same everywhere, and stretched to an empty one: which layer would show something."""
    try:
        way = f"The last layer that does is layer={choose_another()!r}, which is taken where none is named."
    except SelectorError as error:
        way = f"And {error}"
    grid = "×".join(map(str, maps.shape[2:]))
    return LayoutError(
        f"layer {site.site.shown!r} gives maps on a grid of {grid}, one place for the whole input, which does not show "
        f"where. {way}"
    )


def _maskable(seen: _Seen, shown: Subject) -> Scores:
    if not shown.image.is_floating_point():
        raise TypeError("scorecam puts masks on the input, and token ids cannot be masked: use another method.")
    return seen.score
