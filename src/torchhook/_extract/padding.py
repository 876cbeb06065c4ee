"""What is known of the padding of a batch, and whether the model itself lets padding into the features of a row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.targets import Target
from torchhook._extract.inputs import fields_of, mask_beside
from torchhook._features.api import shown
from torchhook._values import tree
from torchhook._values.call_masks import look_padded, masks_in
from torchhook._values.heads import NoPart, Where, token_dim
from torchhook._values.padding import Asked, Lengths, Masks
from torchhook._values.tree import Inputs
from torchhook.errors import PaddingWarning, warn
from torchhook.transforms import Rows

Said: TypeAlias = "Masks | Lengths | Literal[False] | None"
"""What ``lengths=`` says of a batch: ``None`` if it was left out, ``False`` if nothing is to be taken for padding."""

# Shares of the largest value. Another order of sums makes a hundredth of the first in float32; CUDA may round to TF32.
_LITTLE, _LITTLE_ON_CUDA, _LITTLE_IN_HALVES = 1e-3, 1e-2, 1e-1


class PaddingOf:
    """Finds the padding of the batches that a model is called with, for each of the sites."""

    def __init__(self, model: nn.Module, targets: Sequence[Target]) -> None:
        self.paths = {str(target.site): target.site.path for target in targets}
        self.parameters = calling.parameter_names(model)
        self.pads, self.likely_pads = _pad_ids(model)
        self.warned = self.tried = False

    def __call__(self, call: Inputs, batch: Any, said: Said, wanted: bool) -> dict[str, Asked]:
        """What is known for each site where anything is. ``wanted`` says whether any transform may ask."""
        if said is not None:
            return {site: Asked(said) for site in self.paths} if said else {}
        beside = mask_beside(batch)
        also = fields_of(batch) if beside is None else {"attention_mask": beside}
        found = masks_in(call, self.parameters, also)
        if found.masks:
            masks = {site: found.of_site(path) for site, path in self.paths.items()}
            return {site: Asked(mask) for site, mask in masks.items() if mask is not None}
        # Once told, it need not be looked for again.
        if not wanted or self.warned or not (found.unread or look_padded(call, self.pads, self.likely_pads)):
            return {}
        return {site: Asked(None) for site in self.paths}

    def say_unknown(self, known: Mapping[str, Asked]) -> None:
        """Warn, once, if a transform took padding in because nobody knows what is padding."""
        asked = [site for site, padding in known.items() if padding.known is None and padding.asked]
        if asked and not self.warned:
            self.warned = True
            warn(
                f"{', '.join(map(repr, map(shown, asked[:3])))}: rows of the data look padded, and no mask is known "
                "that tells where, so that padding is part of the features, and other batches give others. Give the "
                "model its attention mask, or say lengths= (a field of the batch, or a function of it: lengths or a "
                "mask; lengths=False if this is no padding).",
                PaddingWarning,
            )


def _pad_ids(model: nn.Module) -> tuple[set[int], set[int]]:
    """Token ids that the model takes for padding, and those that a run of at an end is likely to be."""
    config = getattr(model, "config", None)
    told = {getattr(config, "pad_token_id", None)}
    told |= {module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding)}
    pads = {pad for pad in told if isinstance(pad, int) and pad >= 0}
    end = getattr(config, "eos_token_id", None)
    return pads, {0 if not pads else -1, end if isinstance(end, int) else -1} - {-1}


# -- does the model itself let padding in -------------------------------------------------------------


class Trial:
    """One row of a padded batch is run again, alone and unpadded: its features should be the same.

    ``known`` says what is left out of the features, ``own`` what the model itself is told of padding.
    """

    def __init__(
        self,
        call: Inputs,
        known: Mapping[str, Asked],
        own: Mapping[str, Asked],
        heads: Mapping[str, Where],
        whole: bool,
        halves: bool,
    ) -> None:
        self.call, self.known, self.heads, self.whole, self.halves = call, known, heads, whole, halves
        self.values: dict[str, list[Tensor]] = {}
        self.kept = _mask(known, call)
        # Who leaves special tokens out by a mask says nothing of padding: the row needs them, alone as well.
        self.mask = self.kept if own is known else _mask(own, call)
        if self.mask is None:  # or the model is told of none, where there is some
            self.mask = _if_padding(known, self.kept)
        if self.mask is not None and (self.kept is None or bool((self.kept & ~self.mask).any())):
            self.mask = None
        self.row = 0 if self.mask is None else _row_to_try(self.mask)

    def keep(self, put: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        """``put``, remembering what the row has in its batch."""

        def both(site: str, value: Any) -> None:
            # Who did not ask for the padding wants it in, as masked=False says.
            if self.mask is not None and site in self.known and (self.whole or self.known[site].asked):
                assert self.kept is not None
                self.values[site] = _tensors(value, len(self.mask), self.kept[self.row], self.row, self.heads[site])
            put(site, value)

        return both

    def run(self, run: Callable[[Inputs, Callable[[str, Any], None]], None]) -> bool:
        """Warn if the row has other features alone; false if there was nothing to try."""
        if self.mask is None or not self.values:
            return False
        alone: dict[str, list[Tensor]] = {}
        left = self._left()

        def put(site: str, value: Any) -> None:
            alone[site] = _tensors(value, 1, left, 0, self.heads[site])

        restore = calling.random_numbers()
        # A model that cannot run one row alone is not wrong for that: then there is nothing to compare.
        with contextlib.suppress(Exception):
            run(_one_row(self.call, self.mask, self.row), put)
        restore()
        for site, parts in self.values.items():
            for one, other in zip(parts, alone.get(site, ()), strict=False):
                if _differ(one, other, self.halves):
                    self._say(site, one, other)
                    return True
        return True

    def _left(self) -> Tensor:
        """Which positions of the row are taken, when it is alone and unpadded."""
        assert self.kept is not None
        assert self.mask is not None
        return self.kept[self.row][self.mask[self.row]]

    @property
    def alone(self) -> dict[str, Asked]:
        """What is known of the row alone: it has no padding, but who leaves out more leaves that out here, too."""
        left = self._left()
        return {} if bool(left.all()) else {site: Asked(Masks((("lengths=", left[None]),))) for site in self.known}

    def _say(self, site: str, one: Tensor, other: Tensor) -> None:
        most, largest = float((one - other).abs().max()), float(other.abs().max())
        warn(
            f"{shown(site)!r}: row {self.row} of a batch has other features alone and unpadded than in its padded "
            f"batch (by up to {most:.3g}, where the largest is {largest:.3g}): the model itself lets padding in. "
            "Does it get the attention mask? Padded on the left, a model with absolute positions needs position_ids "
            "too: (mask.cumsum(1) - 1).clamp(min=0). Else make batches of rows of one length.",
            PaddingWarning,
        )


def _row_to_try(mask: Tensor) -> int:
    """The row with the most padding shows the most; of one position, time and batch could not be told apart."""
    counts = mask.sum(1)
    return int(counts.masked_fill(counts < 2, mask.shape[1]).argmin())


def _if_padding(known: Mapping[str, Asked], mask: Tensor | None) -> Tensor | None:
    """A mask that somebody has given, if it can only mean padding: one side of the rows, and not of all of them."""
    if mask is None or all(isinstance(asked.known, Lengths) for asked in known.values()):
        return mask
    counts, places = mask.sum(1, keepdim=True), torch.arange(mask.shape[1])
    left, right = places < counts, places >= mask.shape[1] - counts
    one_side = torch.equal(mask, left) or torch.equal(mask, right)
    return mask if one_side and bool(mask.all(1).any()) else None


def _mask(known: Mapping[str, Asked], call: Inputs) -> Tensor | None:
    """The one mask of all sites, if it marks any position and fits what the model is called with."""
    kinds = {id(asked.known): asked.known for asked in known.values()}
    masks = [mask for kind in kinds.values() if isinstance(kind, Masks) for _, mask in kind.masks]
    if any(not torch.equal(masks[0], mask) for mask in masks[1:]):
        return None  # of an encoder and a decoder, say: one row would have to be cut in two ways
    for padding in kinds.values():
        for tensor in tree.tensors(call):
            if (
                padding is not None
                and not tensor.is_nested
                and tensor.dim() > 1
                and padding.fits(len(tensor), tensor.shape[1])
            ):
                with contextlib.suppress(ValueError):  # a row without a real position: the transform says so
                    return padding.at(len(tensor), tensor.shape[1])
    return None


def _tensors(value: Any, rows: int, kept: Tensor, row: int, heads: Where) -> list[Tensor]:
    """The features of a row, without what is left out; empty where rows are more or fewer, which is told elsewhere."""
    columns = value.values() if isinstance(value, dict) else [value]
    if any(isinstance(column, Rows) for column in columns):  # cut already
        return [column[row].detach().clone() for column in columns if isinstance(column, Rows) and len(column) == rows]
    found = []
    for tensor in tree.tensors(value):
        if tensor.dim() and not tensor.is_nested and len(tensor) == rows and tensor.is_floating_point():
            one, time = tensor[row], _time(tensor, heads)
            if time is not None and tensor.shape[time] == len(kept):
                one = one.index_select(time - 1, kept.nonzero().squeeze(1).to(tensor.device))
            found.append(one.detach().clone())
    return found


def _time(tensor: Tensor, heads: Where) -> int | None:
    if tensor.dim() < 3:
        return None
    try:
        return 1 if tensor.dim() == 3 else token_dim(tensor.shape, heads(), otherwise=1)
    except NoPart:  # then shapes differ, and nothing is compared
        return None


def _one_row(call: Inputs, mask: Tensor, row: int) -> Inputs:
    real = mask[row].nonzero().squeeze(1)

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.is_nested or len(tensor) != len(mask):
            return tensor
        one = tensor[row : row + 1]
        wide = tensor.dim() > 1 and tensor.shape[1] == mask.shape[1]
        return one.index_select(1, real.to(tensor.device)) if wide else one

    found: Inputs = tree.map_tensors(cut, call)
    return found


def _differ(one: Tensor, other: Tensor, halves: bool) -> bool:
    if one.shape != other.shape or not one.numel():
        return False
    allowed = _LITTLE_IN_HALVES if halves else _LITTLE_ON_CUDA if one.is_cuda else _LITTLE
    return float((one.double() - other.double()).abs().max()) > allowed * max(float(other.abs().max()), 1e-6)
