"""Special tokens that are left out: their ids, where these are in a batch, and which tokens a site has without them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook import transforms
from torchhook._features.api import shown
from torchhook._values import padding, tree
from torchhook._values.padding import Known, Masks
from torchhook._values.tree import Inputs
from torchhook._values.value_object import ValueObject
from torchhook.errors import ExtractError, TransformError
from torchhook.transforms import Rows

Drop = bool | Collection[int]
"""Special tokens to leave out: ``True`` for those that the model's configuration names, or their ids."""

_NAMES = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


def special_ids(model: nn.Module, drop: Drop) -> frozenset[int] | None:
    """The ids of tokens that are left out; ``None`` if tokens are not looked at, and rows stay whole."""
    if drop is False:
        return None
    if drop is not True:
        return _given(drop)
    found = set(_configured(model))
    # BERT's configuration knows its padding alone: then the special tokens would stay in, and nobody would know.
    if not found:
        raise ExtractError(
            "drop_special=True: the model's configuration names no special tokens but padding. Give their ids: "
            "drop_special=tokenizer.all_special_ids."
        )
    if len(found) > 1:
        sets = " and ".join(str(sorted(ids)) for ids in found)
        raise ExtractError(
            f"drop_special=True: parts of the model have configurations that name different special tokens, {sets}. "
            "Give their ids: drop_special=tokenizer.all_special_ids."
        )
    return found.pop()


def _given(drop: Any) -> frozenset[int]:
    """The ids that a user has listed, and nothing that could be taken for such."""
    wrong: Any = drop
    if isinstance(drop, Iterable) and not isinstance(drop, (str, bytes, Mapping)):
        try:
            listed = list(drop)
            wrong = next((one for one in listed if not _is_id(one)), None)
            if wrong is None:
                return frozenset(operator.index(one) for one in listed)
        except TypeError:  # a tensor of no dims, which cannot be gone through
            pass
    raise TypeError(
        f"drop_special={drop!r}: expected a list of token ids, found {wrong!r}. Give tokenizer.all_special_ids, True "
        "for the special tokens that the model's configuration names, or False."
    )


def _is_id(one: Any) -> bool:
    if isinstance(one, Tensor):
        return not one.dim() and not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool)
    return hasattr(one, "__index__") and not isinstance(one, bool)


def _configured(model: nn.Module) -> Iterator[frozenset[int]]:
    """What the outermost configurations name; a wrapper, and the whole of two towers, may have none that does."""
    named = {name: _named_ids(model, name) for name in _NAMES}
    if any(ids for name, ids in named.items() if name != "pad"):
        yield frozenset().union(*named.values())
        return
    for child in model.children():
        yield from _configured(child)


def _named_ids(model: nn.Module, name: str) -> frozenset[int]:
    configs = (getattr(model, "config", None), getattr(model, "generation_config", None))
    told = [getattr(config, f"{name}_token_id", None) for config in configs]
    flat = [one for ids in told for one in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return frozenset(int(one) for one in flat if one is not None)


def without(special: frozenset[int] | None) -> str:
    """Which tokens are left out, for the manifest of a store: nothing, where rows stay whole.

    >>> without(frozenset([2, 1])), without(None)
    (', without the tokens [1, 2]', '')
    """
    return "" if special is None else f", without the tokens {sorted(special)}"


# -- where they are ---------------------------------------------------------------------------------------

_IDS = ("input_ids", "decoder_input_ids")
_NO_IDS = ("mask", "position_ids", "token_type_ids", "segment_ids", "labels", "lengths")
"""How the names of whole numbers end that are no token ids."""


class TokenIds:
    """The token ids that a model with these parameters is called with, on the host.

    >>> ids = torch.tensor([[5, 6]])
    >>> TokenIds(Inputs((ids, torch.ones_like(ids)), {}), ["tokens", "attention_mask"]).of_site("h.0")
    [tensor([[5, 6]])]
    """

    def __init__(self, call: Inputs, parameters: Sequence[str]) -> None:
        named = list(_named(call, parameters))
        found = {name: tensor for name, tensor in named if name in _IDS and _may_be_ids(tensor)}
        if not found and not any(name.endswith("inputs_embeds") and value is not None for name, value in named):
            found = dict(zip(_IDS, _unnamed(call, named)[:1], strict=False))
        self._ids = {name: tensor.detach().cpu() for name, tensor in found.items()}
        self._has_two_parts = any(name == "decoder_input_ids" for name in (*parameters, *found))

    @property
    def rows(self) -> int | None:
        """How many rows the batch has, if it has ids."""
        return next((len(ids) for ids in self._ids.values()), None)

    def of_site(self, path: str) -> list[Tensor]:
        """Those that may be the ids of what passes a module: of an encoder and a decoder, each has its own."""
        words = path.split(".")
        if not self._has_two_parts:
            return list(self._ids.values())
        if "encoder" in words or "decoder" in words:
            own = _IDS["encoder" not in words]
            return [self._ids[own]] if own in self._ids else []
        # Outside of both, as the model's own output is, the width decides; a decoder may make its ids itself.
        return list(self._ids.values()) if "decoder_input_ids" in self._ids else []


def _named(call: Inputs, parameters: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in (*zip(parameters, call.args, strict=False), *call.kwargs.items()):
        yield name, value
        if isinstance(value, Mapping):
            yield from ((str(key), part) for key, part in value.items())
    for value in call.args[len(parameters) :]:
        if isinstance(value, Mapping):
            yield from ((str(key), part) for key, part in value.items())


def _unnamed(call: Inputs, named: list[tuple[str, Any]]) -> list[Tensor]:
    """Tensors that may be ids, whatever they are called; a mask is known by its name, or by its numbers."""
    others = {id(value) for name, value in named if name.endswith(_NO_IDS)}
    tensors = list(tree.tensors(call))
    may_be = [tensor for tensor in tensors if _may_be_ids(tensor) and id(tensor) not in others]
    # Ids may be all 0 and 1, but then nothing comes before them.
    return [tensor for tensor in may_be if tensor is tensors[0] or bool((tensor > 1).any())]


def _may_be_ids(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_nested:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


# -- what is left -----------------------------------------------------------------------------------------


class Left:
    """The tokens of a batch's rows, at one site, that are neither padding nor special: as ``Known``, for transforms."""

    def __init__(self, site: str, padding: Known | None, ids: Sequence[Tensor], special: frozenset[int]) -> None:
        self.site, self.padding, self.ids = site, padding, ids
        self._special = torch.tensor(sorted(special), dtype=torch.int64)

    def fits(self, rows: int, width: int) -> bool:
        return any(ids.shape == (rows, width) for ids in self.ids)

    def kept(self, rows: int, width: int) -> Tensor | None:
        """The mask ``(rows, width)`` of what is left, which may be nothing of a row; ``None`` for all of it."""
        plain = [~torch.isin(ids, self._special) for ids in self.ids if ids.shape == (rows, width)]
        if not plain:
            found = " and ".join(f"of shape {tuple(ids.shape)}" for ids in self.ids) or "none"
            raise ExtractError(
                f"{shown(self.site)!r}: drop_special= needs the token ids of {rows} rows of {width} positions, found "
                f"{found} in what the model is called with. Leave such tokens out with lengths= (a mask) instead."
            )
        if any(not torch.equal(plain[0], other) for other in plain[1:]):
            raise ExtractError(
                f"{shown(self.site)!r}: drop_special= finds input_ids and decoder_input_ids that both fit the value, "
                "and differ. Leave such tokens out with lengths= (a mask) instead."
            )
        real = None if self.padding is None else self.padding.at(rows, width)
        left = plain[0] if real is None else plain[0] & real
        return None if bool(left.all()) else left

    def at(self, rows: int, width: int) -> Tensor | None:
        mask = self.kept(rows, width)
        empty = [] if mask is None else (~mask.any(1)).nonzero().flatten().tolist()
        if empty:
            raise TransformError(
                f"row {empty[0]} of the batch has no token that is neither padding nor special (drop_special=)."
            )
        return mask

    def sliced(self, positions: slice) -> Known:
        masks = []
        for ids in self.ids:
            mask = self.kept(*ids.shape)
            masks.append(("drop_special=", torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask))
        left = [ids[:, positions] for ids in self.ids]
        return Left(self.site, Masks(tuple(masks)).sliced(positions), left, frozenset())

    def check(self, value: Any, kept: Any) -> None:
        """Refuse what a function that knows nothing of tokens has made of all of them, special ones too."""
        if isinstance(kept, Rows) or not any(map(self._has_tokens, tree.tensors(value))):
            return
        rows = {len(ids) for ids in self.ids}
        for tensor in tree.tensors(kept):
            if tensor.dim() and not tensor.is_nested and len(tensor) in rows and not self._has_tokens(tensor):
                raise ExtractError(
                    f"{shown(self.site)!r}: drop_special= leaves tokens out, and the transform has made a value of "
                    f"shape {tuple(tensor.shape)} of all of them. Use transforms.pool, tokens or only, which see those "
                    "that are left, or return a value for each token: (N, T, ...)."
                )

    def _has_tokens(self, tensor: Tensor) -> bool:
        if tensor.is_nested or tensor.dim() < 3:
            return False
        return any(self.fits(len(tensor), size) for size in tensor.shape[1:3])


def guarded(transform: Any) -> Any:
    """The same transform, in which a function of somebody's own may not reduce tokens of which it was not told."""
    if isinstance(transform, ValueObject):
        several = getattr(transform, "transforms", None)
        return transform if several is None else transforms.compose(*map(guarded, several))
    return None if transform is None else _Guarded(transform)


@dataclasses.dataclass(frozen=True)
class _Guarded:
    function: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        kept, known = self.function(value), padding.known()
        if isinstance(known, Left):
            known.check(value, kept)
        return kept
