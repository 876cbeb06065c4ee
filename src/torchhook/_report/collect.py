"""From a model and an input to everything that a report shows: a few runs, and the model as it was before."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._attention import attention
from torchhook._cam.api import cam, known_method
from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.offload import loaded
from torchhook._core.select import Selector
from torchhook._layers.api import seconds, untrained
from torchhook._recording.tables import count, size
from torchhook._report import inputs as shown
from torchhook._report import pictures
from torchhook._report.facts import LayerFacts, Page, Picture, Times, Token, Weight
from torchhook._report.findings import findings
from torchhook._report.observe import View, observe
from torchhook._report.score import Score, likely, next_token
from torchhook._values import tree
from torchhook._values.elements import dtype_name
from torchhook._values.moments import rms
from torchhook._values.subclasses import is_part
from torchhook._values.targets import Goal, Labels, is_function, known_labels, name_of, torchvision_labels
from torchhook._values.tree import Inputs
from torchhook._version import __version__
from torchhook._words import listed
from torchhook.errors import NoAttentionError, TorchHookError

_LONG = 1024
_UNTRAINED = (
    "Random weights: wherever it can be told, they are still those that the layers were made with. "
    "The page shows how the model is built, not what a trained one does."
)


def collect(
    model: nn.Module,
    inputs: Any,
    *,
    target: Goal = None,
    image: Any = None,
    tokens: Sequence[str] | None = None,
    labels: Labels | None = None,
    title: str | None = None,
    gradients: bool = True,
    attention: bool = True,
    cam: str | None = "gradcam",
    cam_layer: Selector | None = None,
    train: bool = False,
    repeats: int = 3,
) -> Page:
    """Run the model and gather what ``report`` shows; the arguments are those of ``report``.

    >>> page = collect(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(1, 3))
    >>> [(layer.path, layer.calls[0].shape) for layer in page.layers]
    [('', '(1, 4)'), ('0', '(1, 4)'), ('1', '(1, 4)')]
    """
    # Here, because what goes wrong with a map later is only a note on the page: a misspelled name would be one too.
    if cam is not None:
        known_method(cam)
    index = Index(model)
    # Its first run makes a lazy module another one, which nothing here could undo.
    lazy = [name for name, (m, own) in index.tensors.items() if torch.nn.parameter.is_lazy(getattr(m, own))]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} has no shape yet, and a report leaves it so: call the model once yourself first."
        )
    given = calling.arguments(inputs)
    layers, numbers_of = _layers(index)
    view = View(len(layers), shown.image_tensor(given) is not None)
    view.reads = shown.reads(given)
    notes: list[str] = []
    banner = _UNTRAINED if untrained(index) else ""
    if gradients and any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        gradients = False
        notes.append("No gradients: the model was made in inference mode, where autograd cannot follow.")
    # A caller's inference mode would win over enabled gradients. Whatever the model changes, the next run starts as the
    # first did: each ``again`` puts back random numbers, running statistics and caches.
    with torch.inference_mode(False), calling.undisturbed(model) as again, calling.in_mode(model, train):
        plain, times = seconds(model, index, given, repeats)
        again()
        output, found, sums = observe(model, index, given, target, gradients, layers, numbers_of, view, notes)
        again()
        labels = _class_names(index.modules[""], output, bool(banner), notes) if labels is None else labels
        if attention:
            _attention(model, given, index, layers, numbers_of, view, notes)
        again()
        tensor = shown.image_tensor(given)
        picture = shown.picture(image, tensor)
        if picture is not None and not found.each:
            notes.append("No class activation map: the target is a function of the whole batch; give one sample.")
        elif picture is not None and cam is not None:
            _overlay(model, given, target, found, cam, cam_layer, labels, picture, notes)
    _note_parts(view, index, notes)
    # A first name comes before the others, so that its numbers are there already.
    for layer in layers:
        layer.seconds, layer.own = times.whole.get(layer.path), times.own.get(layer.path)
        if layer.shared_with is not None:
            first = layers[layer.shared_with]
            layer.ran, layer.seconds, layer.own = first.ran, first.seconds, first.own
            layer.silent, layer.idle = first.silent, first.idle
    text = found.text
    word = "token" if next_token(output) else "class"
    if found.label is not None:
        text = text.replace(f"{word} {found.label}", name_of(found.label, labels, word))
    return Page(
        title=title or type(index.modules[""]).__name__,
        model=type(index.modules[""]).__name__,
        about=_about(model, layers, plain, train),
        layers=layers,
        findings=findings(layers),
        input=_described(given),
        output=tree.describe(output),
        score=text,
        picture=picture,
        tokens=_tokens(given, tokens, picture, sums),
        classes=likely(output, labels),
        choices=f"the most likely {'next tokens' if word == 'token' else 'classes'}",
        banner=banner,
        times=_times(layers, plain),
        notes=notes,
    )


def _class_names(model: nn.Module, output: Any, untrained: bool, notes: list[str]) -> Labels | None:
    """What the classes are called, as far as that is known; the classes of random weights mean nothing."""
    found = known_labels(model)
    if found is None and not untrained:
        found = torchvision_labels(model, output)
        if found is not None:
            notes.append("Class names are those of torchvision's own weights for this model: labels= says others.")
    return found


def _note_parts(view: View, index: Index, notes: list[str]) -> None:
    """Say of which values each rank shows its own part: a report asks no other rank."""
    weights = [name for name, (module, own) in index.tensors.items() if is_part(getattr(module, own))]
    names = [repr(name) for name in (*view.parts, *weights)]
    if names:
        notes.append(f"Numbers and pictures of {listed(names)} are those of this rank's part: each rank holds another.")


def _described(given: Inputs) -> str:
    parts = ", ".join([*map(tree.describe, given.args), *(f"{k}={tree.describe(v)}" for k, v in given.kwargs.items())])
    return parts or "nothing"


def _layers(index: Index) -> tuple[list[LayerFacts], dict[int, int]]:
    """The tree, and the number in it of each module's first name."""
    layers: list[LayerFacts] = []
    numbers: dict[str, int] = {}
    first: dict[int, int] = {}
    for number, (path, module) in enumerate(index.modules.items()):
        # The page is JSON, which has no references: layers refer to each other by their place in the list.
        numbers[path] = number
        parent = numbers[path.rpartition(".")[0]] if path else -1
        layers.append(
            LayerFacts(
                path=path,
                type=type(module).__name__,
                parent=parent,
                depth=layers[parent].depth + 1 if path else 0,
                settings=module.extra_repr(),
                parameters=sum(p.numel() for p in set(module.parameters())),
                weights=_weights(module),
                runs=is_callable(module),
                shared_with=first.get(id(module)),
            )
        )
        first.setdefault(id(module), number)
    return layers, first


def _weights(module: nn.Module) -> list[Weight]:
    with loaded(module):
        return [_weight(name, tensor) for name, tensor in _own(module)]


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Not named_parameters(): it leaves out the second name of a tensor that a module holds twice.
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _weight(name: str, tensor: Tensor) -> Weight:
    return Weight(name, tree.describe(tensor), dtype_name(tensor.dtype), tensor.requires_grad, rms(tensor), None)


# -- other runs -----------------------------------------------------------------------------------------


def _attention(
    model: nn.Module,
    given: Inputs,
    index: Index,
    layers: list[LayerFacts],
    numbers_of: dict[int, int],
    view: View,
    notes: list[str],
) -> None:
    if view.tokens > _LONG:  # every map of every layer is held at once, and they grow with the square
        notes.append(f"No attention maps: {view.tokens:,} tokens are too many; th.attention(..., sites=) shows some.")
        return
    try:
        maps = attention(model, given)
    # Most models have no attention, which is worth no word.
    except NoAttentionError:
        return
    except Exception as error:  # as below
        notes.append(f"No attention maps: {type(error).__name__}: {error}")
        return
    for record in maps.records():
        calls = layers[numbers_of[id(index.modules[record.site.path])]].calls
        # Of many calls only the first few were kept: the last of these takes the other maps. Windows give further dims.
        if record.value.dim() == 4 and record.value.numel() and calls:
            calls[min(record.call, len(calls) - 1)].attention.append(pictures.heads(record.value, view.heads))


def _overlay(
    model: nn.Module,
    given: Inputs,
    target: Goal,
    found: Score,
    method: str,
    layer: Selector | None,
    labels: Labels | None,
    picture: Picture,
    notes: list[str],
) -> None:
    try:
        # The class of the first sample, for all samples: only its map is shown.
        made = cam(model, given, target if is_function(target) else found.label, layer=layer, method=method)
        # It would cover the picture in the color of what is not finite, and explain nothing.
        if not bool(made.map.isfinite().all()):
            raise ValueError(f"it is not finite at {made.layer.shown}.")
        picture.overlay = pictures.heat(made.map[0].detach(), picture.width, picture.height)
        said = found.text if isinstance(made.target, str) else name_of(made.target[0], labels)
        picture.caption = f"{method} of {said} at {made.layer.shown}"
    except Exception as error:  # a page without this picture is better than no page
        # Of an error of another kind, KeyError: 'x' for one, the class is half of what is said.
        kind = "" if isinstance(error, (TorchHookError, ValueError)) else f"{type(error).__name__}: "
        notes.append(f"No class activation map: {kind}{error}")


def _tokens(given: Inputs, texts: Sequence[str] | None, picture: Picture | None, sums: list[float]) -> list[Token]:
    tokens = [] if picture is not None and texts is None else shown.tokens_of(given, texts)
    top = max(sums, default=0.0)
    # Fewer sums than tokens are of something else; further ones are of tokens that are not shown.
    if len(sums) >= len(tokens) and top > 0:
        for token, weight in zip(tokens, sums, strict=False):
            token.weight = weight / top
    return tokens


def _times(layers: list[LayerFacts], plain: float) -> Times:
    parents = {layer.parent for layer in layers}
    # Under its other names a shared layer would be counted again.
    own = sum(x.own or 0.0 for i, x in enumerate(layers) if i not in parents and x.shared_with is None)
    return Times(plain, layers[0].seconds, own)


def clock(seconds: float) -> str:
    """A time in milliseconds, or in seconds from ten on: as the page writes every other.

    >>> clock(0.0123456), clock(12.5)
    ('12.35 ms', '12.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.2f} ms"


def _about(model: nn.Module, layers: list[LayerFacts], plain: float, train: bool) -> list[tuple[str, str]]:
    parameters = list(dict.fromkeys(model.parameters()))
    devices = dict.fromkeys(str(p.device) for p in parameters)
    dtypes = dict.fromkeys(dtype_name(p.dtype) for p in parameters)
    total = sum(p.numel() for p in parameters)
    # The heading of the page takes the first, second and fourth by their place.
    return [
        ("layers", f"{len(layers) - 1:,}"),
        ("parameters", count(total).strip() if total >= 1000 else str(total)),
        ("weights", size(sum(p.nbytes for p in parameters))),
        ("forward", clock(plain)),
        ("mode", "train" if train else "eval"),
        ("device", ", ".join(devices) or "cpu"),
        ("dtype", ", ".join(dtypes) or "-"),
        ("made", f"{datetime.datetime.now():%Y-%m-%d %H:%M}"),
        (
            "with",
            f"torchhook {__version__}, torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}",
        ),
    ]
