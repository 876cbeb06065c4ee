"""``cam``: one forward pass in which autograd starts afresh at the layer, one backward pass to it, one formula."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._cam import perturb
from torchhook._cam.inputs import Subject, subject
from torchhook._cam.layer_choice import Grids, choose, map_leaf
from torchhook._cam.layout import Layout, infer
from torchhook._cam.methods import BY_GRADIENT, eigencam, known_method, weighted
from torchhook._cam.result import CAM, stretch, upsample
from torchhook._cam.targets import Goal, Scores
from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook.errors import AmbiguousCallError, LayoutError, NeverRanError, SelectorError

Reshape = Callable[[Tensor], Tensor]


def cam(
    model: nn.Module,
    x: Any,
    target: Goal = None,
    layer: Selector | None = None,
    method: str = "gradcam",
    *,
    layout: str | Reshape | None = None,
    grid: Sequence[int] | None = None,
    batch: int = 32,
    channels: int | None = None,
    progress: bool = True,
) -> CAM:
    """Where in ``x`` the model saw the target: a class activation map for each example.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> result = cam(model, torch.randn(1, 3, 8, 8), target=1)
    >>> result.map.shape, result.layer
    (torch.Size([1, 8, 8]), '1')

    ``method`` is ``"gradcam"``, ``"gradcam++"``, ``"hirescam"``, ``"layercam"``, ``"xgradcam"``, ``"eigencam"``,
    ``"scorecam"`` or ``"ablationcam"``. ``target`` is a class, a class for each example, or a function of the model's
    output that returns one number for each example; ``None`` is the class that the model predicts. ``layer`` is one
    site; without it, the last layer is taken whose map the score depends on in more than one place, and the result
    says which. ``x`` is a tensor, a tuple of arguments or a dict of keyword arguments.

    How the layer's output is laid out is inferred; ``layout`` (``"channels_first"``, ``"channels_last"``, ``"tokens"``,
    or a function that returns batch × channels × grid) and ``grid`` say it where that goes wrong. Score-CAM and
    Ablation-CAM run the model once for each channel, ``batch`` at a time, or for the ``channels`` strongest ones only.

    The model runs in eval mode. Its modes, buffers, parameters' ``.grad`` and hooks, and the process's random numbers,
    are as before afterwards.
    """
    formula = known_method(method)
    index = Index(model)
    known = None if layer is None else _one(index, layer)
    chunks = perturb.Chunks(batch, channels, progress)
    with _quiet(model):
        shown = subject(x)
        site = known or _one(index, choose(model, index, shown, _first_score(target, shown.examples)))
        seen = _look(model, index, site, shown, target, formula in BY_GRADIENT)
        place = _place(seen, shown, layout, grid)
        maps = _maps(place, seen.activation)
        if formula in BY_GRADIENT:
            raw = BY_GRADIENT[formula](maps, _maps(place, _gradient(seen)))
        elif formula == "eigencam":
            raw = eigencam(maps)
        elif formula == "scorecam":
            raw = weighted(maps, perturb.score_weights(model, shown, _maskable(seen, shown), maps, chunks))
        else:
            if not isinstance(place, Layout):
                raise LayoutError(
                    "ablationcam sets channels to zero, and a function does not say where they are: "
                    "use layout='channels_first', 'channels_last' or 'tokens'."
                )
            where = (place, seen.leaf)
            weights = perturb.ablation_weights(
                model, index, seen.target, shown, seen.score, seen.scores, where, maps, chunks
            )
            raw = weighted(maps, weights)
        found = stretch(upsample(raw.relu(), shown.size))
    said = seen.score.classes if seen.score.classes is not None else getattr(target, "__name__", repr(target))
    shape = str(place) if isinstance(place, Layout) else f"by {getattr(place, '__name__', repr(place))}"
    return CAM(found, raw, str(site.site), known is None, said, seen.scores.detach(), formula, shape)


def _one(index: Index, layer: Selector) -> Target:
    targets = resolve(index, layer)
    if len(targets) > 1:
        listed = ", ".join(repr(str(target.site)) for target in targets[:4])
        raise SelectorError(f"layer={layer!r} chooses {len(targets)} sites: {listed}, … A map is made of one.")
    if targets[0].tensor is not None or targets[0].site.port not in ("output", "input"):
        raise SelectorError(
            f"layer={layer!r}: a map is made of what a layer gives or takes, not of a parameter or a gradient."
        )
    return targets[0]


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode, whatever the caller's gradient mode; everything as before afterwards."""
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

    @property
    def activation(self) -> Tensor:
        return next(iter(self.values.values()))

    def begin(self, value: Any, site: Site) -> Any:
        """Let autograd start here: frozen parameters, integer inputs and earlier layers do not matter then."""
        leaf = map_leaf(value)
        if leaf is None:
            raise LayoutError(
                f"{site}: {tree.describe(value)} holds no map. Choose a layer whose output is batch × channels × grid, "
                "batch × grid × channels or batch × tokens × channels."
            )
        self.leaf = leaf
        return tree.put(value, leaf, lambda tensor: self._begin(tensor, site.call or 0))

    def _begin(self, tensor: Tensor, call: int) -> Tensor:
        with torch.set_grad_enabled(self._gradients):
            start = self.values[call] = tensor.detach().clone().requires_grad_(self._gradients)
            # The model goes on with a copy: a layer that works in place must leave the activation alone.
            return start.clone()


def _look(model: nn.Module, index: Index, target: Target, shown: Subject, goal: Goal, gradients: bool) -> _Seen:
    seen = _Seen(target, len(shown.size), gradients)
    session = Session(model, index=index, warn=False)
    session.edit(target, seen.begin)
    seen.grids.watch(session)
    with torch.set_grad_enabled(gradients), session as recording:
        output = calling.call(model, shown.inputs)
        seen.score = Scores(goal, output, shown.examples)
        seen.scores = seen.score(output)
    address = str(target.site)
    if not seen.values:
        raise NeverRanError(f"layer {address!r} never ran: {recording.missing.get(address, 'it was not called.')}")
    if len(seen.values) > 1:
        raise AmbiguousCallError(
            f"layer {address!r} ran {len(seen.values)} times: say which, from {f'{address}#0'!r} to "
            f"{f'{address}#{max(seen.values)}'!r}."
        )
    return seen


def _gradient(seen: _Seen) -> Tensor:
    gradient: Tensor | None = None
    if seen.scores.requires_grad:
        (gradient,) = torch.autograd.grad(seen.scores, seen.activation, torch.ones_like(seen.scores), allow_unused=True)
    if gradient is None:
        raise SelectorError(
            f"layer {str(seen.target.site)!r}: the score does not depend on it by any way that autograd can follow. "
            "Choose another layer; if the model turns gradients off inside, one behind that."
        )
    return gradient


def _place(seen: _Seen, shown: Subject, layout: str | Reshape | None, grid: Sequence[int] | None) -> Layout | Reshape:
    if callable(layout):
        return layout
    kinds = ("channels_first", "channels_last", "tokens")
    if layout is not None and layout not in kinds:
        raise LayoutError(f"layout={layout!r}: use {', '.join(map(repr, kinds))} or a function.")
    try:
        return infer(seen.activation.shape, shown.size, shown.examples, seen.grids.seen, layout, grid)
    except LayoutError as error:
        raise LayoutError(f"layer {str(seen.target.site)!r}: {error}") from None


def _maps(place: Layout | Reshape, value: Tensor) -> Tensor:
    """Batch × channels × grid, in float32 at least: the cube of a half-precision gradient is zero."""
    maps = place.maps(value.detach()) if isinstance(place, Layout) else place(value.detach())
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _maskable(seen: _Seen, shown: Subject) -> Scores:
    if not shown.image.is_floating_point():
        raise TypeError("scorecam puts masks on the input, and token ids cannot be masked: use another method.")
    return seen.score
