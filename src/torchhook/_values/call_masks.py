"""The masks among what a model is called with, and which of them is about which site."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchhook._values import tree
from torchhook._values.padding import Known, Masks, as_mask
from torchhook._values.tree import Inputs

_REAL = "attention_mask"
_PADDED = "key_padding_mask"
"""PyTorch's own name, whose masks are true where others are false."""
_LEAVES_OUT = -1e3
"""Whoever adds so little to a score leaves a position out."""
_UNCLEAR = "padding_mask"
"""True at the padding for some, and elsewhere for others."""

# What the names of masks begin with, by the part of a model that they are about: transformers' names, and torch's.
_OF_PART = {"decoder": ("decoder_", "tgt_"), "encoder": ("encoder_", "src_", ""), "vision": ("pixel_", "vision_")}
_VISION = ("vision", "visual", "image")


@dataclasses.dataclass(frozen=True, eq=False)
class CallMasks:
    """Two-dimensional masks by their names, and the names of all arguments."""

    masks: Mapping[str, Tensor]
    names: Collection[str]
    unread: bool = False
    """Whether there is a mask by its name, other for other rows, of which nobody can say what is padding."""

    def of_site(self, path: str) -> Masks | None:
        """What is known of the padding of what passes a module."""
        chosen = self._of_part(self._part(path))
        return Masks(tuple(chosen.items())) if chosen else None

    def _part(self, path: str) -> str | None:
        """Which part of a model a module is in, where parts are called with data of their own."""
        for word in path.split("."):
            if any(mark in word for mark in _VISION) and any(name.startswith("pixel_values") for name in self.names):
                return "vision"
            if word in ("encoder", "decoder"):
                # A decoder alone, or an encoder, is all of a model of text: then the one mask is about it.
                return word if self._has_two_parts() else None
        return None

    def _has_two_parts(self) -> bool:
        return any(name.startswith(("decoder_", "tgt")) for name in self.names)

    def _of_part(self, part: str | None) -> dict[str, Tensor]:
        if part is not None:
            return {name: mask for name, mask in self.masks.items() if _stem(name) in _OF_PART[part]}
        # Outside of both, as the model's own output is: the width decides.
        return {name: mask for name, mask in self.masks.items() if _stem(name) not in _OF_PART["vision"]}


def _stem(name: str) -> str:
    return name.removesuffix(_REAL).removesuffix(_PADDED).removesuffix("mask")


def masks_in(inputs: Inputs, parameters: Sequence[str], also: Mapping[str, Any] | None = None) -> CallMasks:
    """Find the masks in what a model with these parameters is called with; ``also`` is what else a batch held.

    >>> import torch
    >>> ids, mask = torch.tensor([[5, 6], [7, 0]]), torch.tensor([[1, 1], [1, 0]])
    >>> masks_in(Inputs((ids, mask), {}), ["input_ids", "attention_mask"]).masks
    {'attention_mask': tensor([[ True,  True],
            [ True, False]])}
    """
    named = dict(_named(inputs, parameters))
    if not any("mask" in str(name) for name in (*named, *(also or ()))):  # as for most models, in every batch
        return CallMasks({}, named.keys())
    tensors = list(_with_rows(inputs))
    rows = len(tensors[0]) if tensors else None
    # What is only called mask, or did not reach the model, may be about anything: it must fit an input's positions.
    widths = {size for tensor in tensors if tensor.dim() in (2, 3) for size in tensor.shape[1:]}
    # Beside one for padding, a plain mask says who may attend to whom.
    plain = not any(name.endswith(_PADDED) for name in parameters)
    found: dict[str, Tensor] = {}
    unread = False
    for name, held in {**(also or {}), **named}.items():
        if isinstance(held, Tensor) and not held.is_nested and held.dim() > 1 and len(held) == rows:
            value = _of_positions(held)
            if (name not in named or name == "mask") and value.shape[-1] not in widths:
                continue
            mask = _mask(name, value, plain) if value.dim() == 2 else None
            if mask is not None and not _is_causal(mask):
                found[name] = mask
            elif name.endswith((_REAL, _UNCLEAR)) and bool((held != held[:1]).any()):
                unread = True
    return CallMasks(found, named.keys(), unread)


def _of_positions(mask: Tensor) -> Tensor:
    """A mask ``(N, 1, 1, T)``, one for all heads and queries, as ``(N, T)``; any other as it is."""
    between = mask.shape[1:-1]
    return mask.flatten(0, -2) if between and all(size == 1 for size in between) else mask


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask of as many rows as positions says who may attend to whom: each to itself, and one side of it."""
    rows, width = mask.shape
    if rows != width or rows < 2 or not bool(mask.diagonal().all()) or bool(mask.all()):
        return False
    return torch.equal(mask, mask.tril()) or torch.equal(mask, mask.triu())


def _with_rows(inputs: Inputs) -> Iterator[Tensor]:
    """Tensors of which dim 0 may be the rows; nested ones have rows of their own lengths, and no padding."""
    return (tensor for tensor in tree.tensors(inputs) if tensor.dim() and not tensor.is_nested)


def _named(inputs: Inputs, parameters: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in (*zip(parameters, inputs.args, strict=False), *inputs.kwargs.items()):
        yield name, value
        if isinstance(value, Mapping):  # a whole batch as one argument
            yield from ((str(key), part) for key, part in value.items())


def _mask(name: str, value: Tensor, plain: bool) -> Tensor | None:
    if name.endswith(_PADDED):
        # Floats are added to scores: zero changes nothing.
        return value.detach().cpu() == 0
    if name.endswith(_REAL) or (plain and name == "mask"):
        if value.is_floating_point() and bool(((value == 0) | (value <= _LEAVES_OUT)).all()) and bool(value.any()):
            return value.detach().cpu() == 0  # added to scores
        mask = as_mask(value)
        # Floats that are zero throughout are to be added to scores: they take nothing away.
        return mask if mask is not None and (not value.is_floating_point() or bool(mask.any())) else None
    return None


# -- the call that runs now ----------------------------------------------------------------------------


class CallPadding(threading.local):
    """The padding of the model's call that runs now, in each thread; looked for when a transform asks."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self.parameters = parameters
        self._call: Inputs | None = None
        self._masks: CallMasks | None = None
        self._around: list[Inputs] = []
        """The calls in which the one that runs was made, of a model that calls itself."""

    def begin(self, value: Any, is_inside: Callable[[], bool]) -> None:
        """The model is called with this, its one argument or ``Inputs``; ``is_inside``: as of ``RunningCall``."""
        self._around = [*self._around, self._call] if self._call is not None and is_inside() else []
        self._call = value if isinstance(value, Inputs) else Inputs((value,), {})
        self._masks = None

    def end(self, *_: Any) -> None:
        """The call is over: what passes a part of the model now belongs to the one around it, or to none."""
        self._call = self._around.pop() if self._around else None
        self._masks = None

    def of(self, path: str) -> Known | None:
        """What is known for a module; ``None`` outside of calls."""
        return None if self._call is None else _OfCall(functools.partial(self.masks, path))

    def masks(self, path: str) -> Masks | None:
        """The masks that are about a module, if any of them marks padding."""
        if self._masks is None:
            assert self._call is not None
            self._masks = masks_in(self._call, self.parameters)
        found = self._masks.of_site(path)
        if found is None or all(bool(mask.all()) for _, mask in found.masks):
            return None
        return Masks((*found.masks, *self._of_last(found)))

    def _of_last(self, found: Masks) -> Iterator[tuple[str, Tensor]]:
        """With a cache, a mask is about all positions so far, and the values about the last of them."""
        widths = {t.shape[1] for t in _with_rows(self._call or Inputs((), {})) if t.dim() in (2, 3)}
        for name, mask in found.masks:
            for width in widths:
                if 1 < width < mask.shape[1]:
                    yield f"{name}, of its last {width} positions", mask[:, -width:]


class _OfCall:
    """As ``Masks``, for who captures whatever there is: what has other rows, or one position, has no padding here."""

    def __init__(self, find: Callable[[], Masks | None]) -> None:
        self._find = find

    @functools.cached_property
    def _masks(self) -> Masks | None:
        return self._find()

    def fits(self, rows: int, width: int) -> bool:
        return self._masks is not None and self._masks.fits(rows, width)

    def at(self, rows: int, width: int) -> Tensor | None:
        masks = self._masks
        if masks is None or width == 1:  # one position: the one that a cache lacks, which is real
            return None
        about = any(mask.shape[0] == rows or mask.shape == (width, rows) for _, mask in masks.masks)
        # A table of positions, or what belongs to no row of the batch, has no padding.
        return masks.at(rows, width) if about else None

    def sliced(self, positions: slice) -> Known:
        return self if self._masks is None else _OfCall(functools.partial(self._masks.sliced, positions))


# -- rows that look padded -----------------------------------------------------------------------------


def look_padded(inputs: Inputs, pads: Collection[int], likely: Collection[int] = (0,)) -> bool:
    """Whether rows of what a model is called with begin or end with padding, more of it in some than in others.

    ``pads`` are the token ids that the model takes for padding; a run of a ``likely`` one at an end is taken for it.

    >>> import torch
    >>> look_padded(Inputs((torch.tensor([[5, 6, 7], [8, 1, 1]]),), {}), {1})
    True
    """
    for tensor in _with_rows(inputs):
        if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex() and tensor.shape[1] > 1:
            sure = any(_uneven(tensor == pad, least=1) for pad in pads)
            return sure or any(_uneven(tensor == pad, least=2) for pad in likely)
        if tensor.dim() == 3 and tensor.is_floating_point() and tensor.shape[1] > 1:
            # The ends first: to look at every number of every batch would take as long as to load it.
            ends = (tensor[:, [0, -1]] == 0).all(-1)
            return bool(ends.any()) and _uneven((tensor == 0).all(-1), least=2)
    return False


def _uneven(pads: Tensor, least: int) -> bool:
    """Whether the runs of padding at one end have different lengths; the longest has ``least`` positions or more."""
    for side in (pads, pads.flip(1)):
        runs = side.int().cumprod(1).sum(1)
        if len(runs) and int(runs.max()) >= least and int(runs.min()) < int(runs.max()):
            return True
    return False
