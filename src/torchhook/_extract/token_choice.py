"""Which tokens of a value are taken: those that are neither padding nor special, and where each of them is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._extract.row_numbers import check_number_of_rows
from torchhook._features.api import shown
from torchhook._values import padding, tree
from torchhook._values.heads import KnownHeads, NoPart, Where, has_heads, token_dim, unknown, with_one_token
from torchhook._values.parts import once_each
from torchhook._values.running import Block
from torchhook._values.tree import Inputs
from torchhook.errors import ExtractError, TransformError
from torchhook.transforms import Rows

Drop = bool | Collection[int]
"""Special tokens to leave out: ``True`` for those that the model's configuration names, or their ids."""

_NAMES = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


def special_ids(model: nn.Module, drop: Drop) -> frozenset[int]:
    """The ids of tokens that are left out."""
    if drop is False:
        return frozenset()
    if drop is not True:
        return frozenset(int(number) for number in drop)
    named = {name: _named_ids(model, name) for name in _NAMES}
    # BERT's configuration knows its padding alone: then the special tokens would stay in, and nobody would know.
    if not any(ids for name, ids in named.items() if name != "pad"):
        raise ExtractError(
            "drop_special=True: the model's configuration names no special tokens but padding. Give their ids: "
            "drop_special=tokenizer.all_special_ids."
        )
    return frozenset().union(*named.values())


def _named_ids(model: nn.Module, name: str) -> frozenset[int]:
    configs = (getattr(model, "config", None), getattr(model, "generation_config", None))
    told = [getattr(config, f"{name}_token_id", None) for config in configs]
    flat = [one for ids in told for one in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return frozenset(int(one) for one in flat if one is not None)


def without(special: frozenset[int]) -> str:
    """Which tokens are left out, for the manifest of a store: nothing, where none are.

    >>> without(frozenset([2, 1]))
    ', without the tokens [1, 2]'
    """
    return f", without the tokens {sorted(special)}" if special else ""


class TokenChoice:
    """The tokens of the values of one batch.

    ``maps`` says that values may be maps ``(N, C, H, W)``, whose tokens are pixels; ``channel`` is the dim of a row
    that holds the numbers of a token, where that is not the last, or the first of a map. ``checked`` are the sites
    whose repeated heads were seen to be alike: in one batch, for to look makes the host wait for a GPU. ``paths``
    are those of the modules that sites are at, which a standard name does not show.
    """

    def __init__(
        self,
        call: Inputs,
        rows: int,
        start: int,
        special: frozenset[int],
        channel: int | None,
        maps: bool,
        checked: set[str] | None = None,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.paths = paths or {}
        self.checked = set() if checked is None else checked
        self.rows, self.start, self.channel, self.maps = rows, start, channel, maps
        self.special = torch.tensor(sorted(special)) if special else None
        self.ids = token_ids(call) if special else {}

    def __call__(self, name: str, value: Tensor | Rows, heads: Where = unknown) -> Block:
        """The tokens of a value, a view of it where all are taken, with their rows in the data and positions.

        ``heads`` asks what is known of the heads in it: of ``(N, heads, T, D)``, a token is all of its heads.
        """
        try:
            if isinstance(value, Rows):
                return self._of_rows(name, value)
            if value.dim() > 2 and self.channel is None:
                value, known = with_one_token(self._unfolded(value, heads), heads())
                if value.dim() == 4 and self._has_heads(value, known):
                    value = _tokens_first(name, value, known, self.checked).flatten(2)
            tokens, width = self._flat(name, value)
            mask = self._mask(value, width)
        except TransformError as error:
            raise ExtractError(f"{shown(name)!r}: {error} With lengths=False, all positions are taken.") from error
        wanted = self._wanted(name, value, width, mask)
        times = len(tokens) // (self.rows * width) if width else 1  # several of one position: its heads
        positions = torch.arange(width).expand(self.rows, -1) if mask is None else mask.cumsum(1) - 1
        rows = torch.arange(self.start, self.start + self.rows)[:, None].expand(-1, width)
        if wanted is None:
            return Block(tokens, *(part.reshape(-1).repeat_interleave(times) for part in (rows, positions)))
        # Counted on the host: indexing by a mask would make it wait until the GPU has counted.
        places = wanted.repeat_interleave(times, 1).reshape(-1).nonzero().squeeze(1)
        chosen = tokens.index_select(0, places.to(tokens.device, non_blocking=True))
        return Block(chosen, *(part.repeat_interleave(times, 1).reshape(-1)[places] for part in (rows, positions)))

    def by_row(self, name: str, value: Any, heads: Where = unknown) -> Any:
        """The tokens of each row, where a value has any; what is made of all tokens of a row stays as it is."""
        if isinstance(value, Rows):
            self._of_rows(name, value)  # which says what is missing
        if not isinstance(value, Tensor) or value.is_nested or value.dim() < 3:
            return value
        if with_one_token(value, heads())[0] is not value:
            return value
        value = self._unfolded(value, heads)
        check_number_of_rows(name, value, self.rows)
        first = value if value.dim() == 3 else _tokens_first(name, value, heads(), self.checked)
        try:
            mask = self._mask(first, first.shape[1])
        except TransformError as error:
            raise ExtractError(f"{shown(name)!r}: {error} With lengths=False, all positions are taken.") from error
        wanted = self._wanted(name, first, first.shape[1], mask)
        if wanted is None:
            return Rows(first.unbind())
        # Counted on the host, as above.
        places = wanted.reshape(-1).nonzero().squeeze(1)
        chosen = first.flatten(0, 1).index_select(0, places.to(first.device, non_blocking=True))
        return Rows(chosen.split(wanted.sum(1).tolist()))

    def _unfolded(self, value: Tensor, heads: Where) -> Tensor:
        """``(N, heads, T, D)``, where a product has made one dim of rows and heads."""
        if value.dim() != 3 or len(value) == self.rows or len(value) != self.rows * heads().folded:
            return value
        unfolded: Tensor = value.unflatten(0, (self.rows, -1))
        return unfolded

    def _has_heads(self, value: Tensor, known: KnownHeads) -> bool:
        """Whether heads have a dim of their own; who takes no maps need not fear to take one for heads."""
        return has_heads(value.shape, known) or (bool(known.counts) and not self.maps)

    def _flat(self, name: str, value: Tensor) -> tuple[Tensor, int]:
        """All tokens ``(n, channels)``, row by row, and how many positions a row has."""
        if value.dim() < 3:
            if value.dim() == 2 and len(value) != self.rows and self.rows and len(value) % self.rows == 0:
                return value, len(value) // self.rows  # rows and positions in one dim, as routers of experts have them
            check_number_of_rows(name, value, self.rows)
            return value[:, None] if value.dim() == 1 else value, 1
        check_number_of_rows(name, value, self.rows)
        if value.dim() > 3 and not self.maps:
            raise _no_tokens(name, value)
        channel = self._channel(value)
        last = value if channel == value.dim() - 1 else value.movedim(channel, -1)
        tokens = last.reshape(-1, last.shape[-1])
        # Of (N, T, heads, D), the heads of a token are at one position; the pixels of a map have each their own.
        known = padding.known()
        by_time = known is not None and channel != 1 and known.fits(self.rows, value.shape[1])
        if by_time and value.dim() > 3 and value.shape[1] == value.shape[2]:
            raise ExtractError(
                f"{shown(name)!r}: positions may be dim 1 or dim 2 of a value of shape {tuple(value.shape)}. Say which "
                "with a transform: lambda v: v.flatten(2), or lambda v: v.transpose(1, 2).flatten(2)."
            )
        return tokens, value.shape[1] if by_time or (value.dim() == 3 and channel == 2) else len(tokens) // self.rows

    def _channel(self, value: Tensor) -> int:
        if self.channel is not None:
            dims = value.dim() - 1
            if not -dims <= self.channel < dims:
                raise ValueError(f"channel={self.channel}: a row has the shape {tuple(value.shape[1:])}.")
            return self.channel % dims + 1
        known = padding.known()
        is_map = value.dim() == 4 and not (known is not None and known.fits(self.rows, value.shape[1]))
        return 1 if is_map else value.dim() - 1

    def _mask(self, value: Tensor, width: int) -> Tensor | None:
        known = padding.known()
        if known is None or value.dim() < 2 or (value.dim() == 2 and width == 1):
            return None
        return known.at(self.rows, width)

    def _wanted(self, name: str, value: Tensor, width: int, mask: Tensor | None) -> Tensor | None:
        """Which positions are taken, ``(rows, width)``; ``None`` for all."""
        if self.special is None or (width == 1 and not self._is_one_token(name, value)):
            return mask
        ids = self._ids_of(name, width)
        plain = ~torch.isin(ids, self.special)
        return plain if mask is None else plain & mask

    def _is_one_token(self, name: str, value: Tensor) -> bool:
        """Whether rows are of one token; else one value for each was made of all tokens, and none can be left out."""
        ids = self._named(name)
        return value.dim() > 2 and ids is not None and ids.shape[1] == 1

    def _ids_of(self, name: str, width: int) -> Tensor:
        chosen = self._named(name)
        if chosen is None or chosen.shape != (self.rows, width):
            found = "none" if chosen is None else f"of shape {tuple(chosen.shape)}"
            raise ExtractError(
                f"{shown(name)!r}: drop_special= needs the token ids of {self.rows} rows of {width} positions, found "
                f"{found} in what the model is called with. Leave such tokens out with lengths= (a mask) instead."
            )
        return chosen

    def _named(self, name: str) -> Tensor | None:
        path = self.paths.get(name) or self.paths.get(name.rpartition("[")[0], name)
        of_decoder = "decoder" in path.split(".") and "decoder_input_ids" in self.ids
        own = "decoder_input_ids" if of_decoder else "input_ids"
        return self.ids.get(own, next(iter(self.ids.values()), None))

    def _of_rows(self, name: str, value: Rows) -> Block:
        check_number_of_rows(name, value, self.rows)
        if self.special is not None:
            raise ExtractError(f"{shown(name)!r}: rows of the transform's own making have no token ids to drop by.")
        rows = [row[:, None] if row.dim() == 1 else row.reshape(-1, row.shape[-1]) for row in value]
        lengths = torch.tensor([len(row) for row in rows])
        numbers = torch.arange(self.start, self.start + self.rows).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        return Block(torch.cat(rows), numbers, positions)


def tokens_first(name: str, value: Tensor, heads: Where, checked: set[str]) -> Tensor:
    """``(N, T, heads, D)`` of ``(N, heads, T, D)``, and one dim of heads without tokens; any other as it is."""
    if value.dim() == 3 and not value.is_nested and with_one_token(value, heads())[0] is not value:
        return value.flatten(1)
    if value.dim() != 4 or value.is_nested or not has_heads(value.shape, heads()):
        return value
    return _tokens_first(name, value, heads(), checked)


def _tokens_first(name: str, value: Tensor, known: KnownHeads, checked: set[str]) -> Tensor:
    """``(N, T, …)``, where tokens may come after the heads, and heads may be repeated, which one batch may need."""
    if not known.counts:
        raise _no_tokens(name, value)
    try:
        once = once_each(value, known, name not in checked)
        if once is not value:
            checked.add(name)
        return once.movedim(token_dim(value.shape, known), 1)
    except NoPart as error:
        raise _no_tokens(name, value, f": {error.why}") from None


def _no_tokens(name: str, value: Tensor, why: str = ".") -> ExtractError:
    return ExtractError(
        f"{shown(name)!r}: a value of shape {tuple(value.shape)} is no rows of tokens (N, T, D){why} Say with a "
        "transform what its tokens are: of a map, lambda v: v.flatten(2).transpose(1, 2); of heads before tokens, "
        "lambda v: v.transpose(1, 2).flatten(2); of tokens before heads, lambda v: v.flatten(2). Of several tensors, "
        "transforms.pick chooses one."
    )


def token_ids(call: Inputs) -> dict[str, Tensor]:
    """The token ids that a model is called with, by their names; without such a name, the first that may be ids."""
    named = [call.kwargs, *(part for part in call.args if isinstance(part, Mapping))]
    found = {name: part[name] for part in named for name in _IDS if _may_be_ids(part.get(name))}
    if not found:
        first = next((tensor for tensor in tree.tensors(call) if _may_be_ids(tensor)), None)
        found = {} if first is None else {_IDS[0]: first}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


_IDS = ("input_ids", "decoder_input_ids")


def _may_be_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() and not value.is_nested
