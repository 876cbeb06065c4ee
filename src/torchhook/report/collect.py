"""From a model and an input to everything that a report shows: a few runs, and the model as it was before."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook import running, tree
from torchhook._version import __version__
from torchhook.attention import NoAttentionError, attention
from torchhook.cam import cam
from torchhook.report import inputs as shown
from torchhook.report import pictures
from torchhook.report.facts import Call, Layer, Page, Picture, Token, Weight
from torchhook.report.findings import findings
from torchhook.report.measure import numbers, rms
from torchhook.report.score import Score, Target, likely, name_of, score
from torchhook.report.timing import seconds
from torchhook.select import Index, is_callable
from torchhook.select import Target as Place
from torchhook.session import Session
from torchhook.sites import Site
from torchhook.tables import count, size
from torchhook.tree import Inputs

_CALLS = 4  # of a layer that runs hundreds of times, the first few are enough to look at
_LONG = 1024


def collect(
    model: nn.Module,
    x: Any,
    *,
    target: Target = None,
    image: Any = None,
    tokens: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    title: str | None = None,
    gradients: bool = True,
    attention: bool = True,
    cam: str | None = "gradcam",
    cam_layer: str | None = None,
    train: bool = False,
    repeats: int = 3,
) -> Page:
    """Run the model and gather what ``report`` shows; the arguments are those of ``report``.

    >>> page = collect(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(1, 3))
    >>> [(layer.path, layer.calls[0].shape) for layer in page.layers]
    [('', '(1, 4)'), ('0', '(1, 4)'), ('1', '(1, 4)')]
    """
    index = Index(model)
    lazy = [name for name, (m, own) in index.tensors.items() if torch.nn.parameter.is_lazy(getattr(m, own))]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} has no shape yet, and a report leaves it so: call the model once yourself first."
        )
    given = running.arguments(x)
    layers, numbers_of = _layers(index)
    view = _View(len(layers), shown.image_tensor(given) is not None)
    notes: list[str] = []
    if gradients and any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        gradients = False
        notes.append("No gradients: the model was made in inference mode, where autograd cannot follow.")
    with torch.inference_mode(False), running.undisturbed(model) as again, _mode(model, train):
        times = seconds(model, index, given, repeats)
        again()
        output, found, sums = _observe(model, index, given, target, gradients, layers, numbers_of, view, notes)
        again()
        if attention:
            _attention(model, given, index, layers, numbers_of, view, notes)
        again()
        picture = shown.picture(image, shown.image_tensor(given))
        if picture is not None and cam is not None:
            _overlay(model, x, found, cam, cam_layer, classes, picture, notes)
    for layer in layers:
        layer.seconds = times.get(layer.path)
        if layer.shared_with is not None:
            first = layers[layer.shared_with]
            layer.ran, layer.seconds, layer.silent = first.ran, first.seconds, first.silent
    text = found.text if found.label is None else found.text.replace(f"class {found.label}", _label(found, classes))
    return Page(
        title=title or type(index.modules[""]).__name__,
        model=type(index.modules[""]).__name__,
        about=_about(model, layers, times, train),
        layers=layers,
        findings=findings(layers),
        input=_described(given),
        output=tree.describe(output),
        score=text,
        picture=picture,
        tokens=_tokens(given, tokens, picture, sums),
        classes=likely(output, classes),
        notes=notes,
    )


def _described(given: Inputs) -> str:
    parts = ", ".join([*map(tree.describe, given.args), *(f"{k}={tree.describe(v)}" for k, v in given.kwargs.items())])
    return parts or "nothing"


class _View:
    """How much of each layer is shown: less where there are many, so that the page stays small."""

    def __init__(self, layers: int, patches: bool) -> None:
        self.patches = patches
        self.maps = 15 if layers < 400 else 7 if layers < 900 else 3
        self.side = 56 if layers < 300 else 40 if layers < 600 else 28
        self.heads = 64 if layers < 600 else 40
        self.tokens = 0
        """The longest sequence that was seen."""


def _layers(index: Index) -> tuple[list[Layer], dict[int, int]]:
    """The tree, and the place in it of each module's first name."""
    layers: list[Layer] = []
    places: dict[str, int] = {}
    first: dict[int, int] = {}
    for number, (path, module) in enumerate(index.modules.items()):
        places[path] = number
        parent = places[path.rpartition(".")[0]] if path else -1
        layers.append(
            Layer(
                path=path,
                type=type(module).__name__,
                parent=parent,
                depth=layers[parent].depth + 1 if path else 0,
                settings=module.extra_repr(),
                parameters=sum(p.numel() for p in set(module.parameters())),
                weights=[_weight(name, t) for name, t in _own(module)],
                runs=is_callable(module),
                shared_with=first.get(id(module)),
            )
        )
        first.setdefault(id(module), number)
    return layers, first


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _weight(name: str, tensor: Tensor) -> Weight:
    return Weight(name, tree.describe(tensor), _dtype(tensor), tensor.requires_grad, rms(tensor), None)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- the run that is looked at ------------------------------------------------------------------------


def _observe(
    model: nn.Module,
    index: Index,
    given: Inputs,
    target: Target,
    gradients: bool,
    layers: list[Layer],
    numbers_of: dict[int, int],
    view: _View,
    notes: list[str],
) -> tuple[Any, Score, list[float]]:
    session = Session(model, index=index, warn=False)
    sums: list[float] = []
    order = itertools.count()
    for key, number in numbers_of.items():
        module = index.distinct[key]
        if is_callable(module):
            site, looker = Site(layers[number].path), _Looker(layers[number], view, order, sums)
            session.look(Place(site, module), looker.value)
            if gradients:
                session.look(Place(site._replace(port="grad"), module), looker.gradient)
    with torch.set_grad_enabled(gradients), session as recording:
        leaves, inputs = _differentiable(given) if gradients else ([], tree.map_tensors(Tensor.clone, given))
        with _some_gradient(model, leaves, gradients):
            output = model(*inputs.args, **inputs.kwargs)
            found = score(output, target)
            if gradients:
                _backward(index, found, leaves, layers, numbers_of, notes)
    for layer in layers:
        if layer.runs and not layer.ran and layer.shared_with is None:
            layer.silent = recording.missing.get(str(Site(layer.path)), "the model did not call it.")
    return output, found, sums


def _backward(
    index: Index,
    found: Score,
    leaves: list[Tensor],
    layers: list[Layer],
    numbers_of: dict[int, int],
    notes: list[str],
) -> None:
    if found.value is None or not found.value.requires_grad:
        why = found.text if found.value is None else "the output does not depend on anything that requires one"
        notes.append(f"No gradients: {why}.")
        return
    owned = [
        (numbers_of[key], name, tensor)
        for key, module in index.distinct.items()
        for name, tensor in module._parameters.items()
        if tensor is not None and tensor.requires_grad
    ]
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

    def __init__(self, layer: Layer, view: _View, order: Iterator[int], sums: list[float]) -> None:
        self._layer = layer
        self._view = view
        self._order = order
        self._sums = sums

    def value(self, value: Any, call: int) -> None:
        self._layer.ran = call + 1
        if call >= _CALLS:
            return
        tensors = list(tree.tensors(value))
        leaf, tensor = _main(value)
        seen = Call(
            shape=tree.describe(value),
            dtype="/".join(dict.fromkeys(map(_dtype, tensors))) or "-",
            device="/".join(dict.fromkeys(str(t.device) for t in tensors)) or "-",
            nbytes=sum(t.nbytes for t in tensors if t.layout == torch.strided and not t.is_nested),
            order=next(self._order),
            leaf=leaf,
        )
        if tensor is not None:
            self._view.tokens = max(self._view.tokens, tensor.shape[1] if tensor.dim() == 3 else 0)
            with torch.no_grad():
                seen.value = numbers(tensor)
                if seen.value is not None:
                    seen.maps = pictures.feature_maps(tensor, self._view.patches, self._view.maps, self._view.side)
        self._layer.calls.append(seen)

    def gradient(self, value: Any, call: int) -> None:
        if call >= len(self._layer.calls):
            return
        seen = self._layer.calls[call]
        parts = [t for address, t in tree.leaves(value) if address == seen.leaf and isinstance(t, Tensor)]
        tensor = parts[0] if parts else None
        if tensor is None:
            return
        with torch.no_grad():
            seen.gradient = numbers(tensor)
            if tensor.dim() == 3:
                # Gradients arrive last layer first: what stays is the one nearest to the input.
                self._sums[:] = tensor[0].float().norm(dim=-1).tolist()


def _main(value: Any) -> tuple[str, Tensor | None]:
    """The first floating-point tensor of a value, and its address in it."""
    found = [(address, leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    floats = [(a, t) for a, t in found if t.is_floating_point() or t.is_quantized]
    return next(iter(floats or found), ("", None))


# -- other runs -----------------------------------------------------------------------------------------


def _attention(
    model: nn.Module,
    given: Inputs,
    index: Index,
    layers: list[Layer],
    numbers_of: dict[int, int],
    view: _View,
    notes: list[str],
) -> None:
    if view.tokens > _LONG:  # every map of every layer is held at once, and they grow with the square
        notes.append(f"No attention maps: {view.tokens:,} tokens are too many; th.attention(..., layers=) shows some.")
        return
    inputs = tree.map_tensors(Tensor.clone, given)
    try:
        with torch.no_grad():
            maps = attention(model, *inputs.args, kwargs=inputs.kwargs)
    except NoAttentionError:
        return
    except Exception as error:
        notes.append(f"No attention maps: {type(error).__name__}: {error}")
        return
    for record in maps.records():
        calls = layers[numbers_of[id(index.modules[record.site.path])]].calls
        if record.value.dim() == 4 and record.value.numel() and calls:
            calls[min(record.call, len(calls) - 1)].attention.append(pictures.heads(record.value, view.heads))


def _overlay(
    model: nn.Module,
    x: Any,
    found: Score,
    method: str,
    layer: str | None,
    classes: Sequence[str] | None,
    picture: Picture,
    notes: list[str],
) -> None:
    try:
        made = cam(model, x, found.label, layer=layer, method=method)
        if not bool(made.map.isfinite().all()):
            raise ValueError(f"it is not finite at {made.layer}.")
        picture.overlay = pictures.heat(made.map[0].detach(), picture.width, picture.height)
        picture.caption = f"{method} of {_label(found, classes)} at {made.layer}"
    except Exception as error:  # a page without this picture is better than no page
        notes.append(f"No class activation map: {error}")


def _label(found: Score, classes: Sequence[str] | None) -> str:
    return found.text if found.label is None else name_of(found.label, classes)


def _tokens(given: Inputs, texts: Sequence[str] | None, picture: Picture | None, sums: list[float]) -> list[Token]:
    tokens = [] if picture is not None and texts is None else shown.tokens_of(given, texts)
    top = max(sums, default=0.0)
    if len(sums) >= len(tokens) and top > 0:
        for token, weight in zip(tokens, sums, strict=False):
            token.weight = weight / top
    return tokens


@contextlib.contextmanager
def _mode(model: nn.Module, train: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = train
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _about(model: nn.Module, layers: list[Layer], times: dict[str, float], train: bool) -> list[tuple[str, str]]:
    parameters = list(dict.fromkeys(model.parameters()))
    devices = dict.fromkeys(str(p.device) for p in parameters)
    dtypes = dict.fromkeys(_dtype(p) for p in parameters)
    whole, total = times.get(""), sum(p.numel() for p in parameters)
    return [
        ("layers", f"{len(layers) - 1:,}"),
        ("parameters", count(total).strip() if total >= 1000 else str(total)),
        ("weights", size(sum(p.nbytes for p in parameters))),
        ("forward", "-" if whole is None else f"{whole * 1e3:.1f} ms"),
        ("mode", "train" if train else "eval"),
        ("device", ", ".join(devices) or "cpu"),
        ("dtype", ", ".join(dtypes) or "-"),
        ("made", f"{datetime.datetime.now():%Y-%m-%d %H:%M}"),
        ("with", f"torchhook {__version__}, torch {torch.__version__.partition('+')[0]}, {platform.python_version()}"),
    ]
