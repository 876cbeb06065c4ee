"""Which tokens of a value are taken: those that are neither padding nor special, and where each of them is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchhook._extract.row_numbers import check_number_of_rows
from torchhook._extract.special_tokens import Left
from torchhook._features.api import shown
from torchhook._values import padding
from torchhook._values.heads import KnownHeads, NoPart, Where, has_heads, token_dim, unknown, with_one_token
from torchhook._values.parts import once_each
from torchhook._values.running import Block
from torchhook.errors import ExtractError, TransformError
from torchhook.transforms import Rows


class TokenChoice:
    """The tokens of the values of one batch.

    ``maps`` says that values may be maps ``(N, C, H, W)``, whose tokens are pixels; ``channel`` is the dim of a row
    that holds the numbers of a token, where that is not the last, or the first of a map. ``checked`` are the sites
    whose repeated heads were seen to be alike: in one batch, for to look makes the host wait for a GPU.

    What is padding, and what is special, is known in the hook (``padding.known``); positions are counted among the
    tokens that are left.
    """

    def __init__(self, rows: int, start: int, channel: int | None, maps: bool, checked: set[str] | None = None) -> None:
        self.checked = set() if checked is None else checked
        self.rows, self.start, self.channel, self.maps = rows, start, channel, maps
        self._everywhere: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

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
        times = len(tokens) // (self.rows * width) if width else 1  # several of one position: its heads
        if mask is None:
            return Block(tokens, *self._all_places(width, times))
        positions = mask.cumsum(1) - 1
        rows = torch.arange(self.start, self.start + self.rows)[:, None].expand(-1, width)
        # Counted on the host: indexing by a mask would make it wait until the GPU has counted.
        places = mask.repeat_interleave(times, 1).reshape(-1).nonzero().squeeze(1)
        chosen = tokens.index_select(0, places.to(tokens.device, non_blocking=True))
        return Block(chosen, *(part.repeat_interleave(times, 1).reshape(-1)[places] for part in (rows, positions)))

    def _all_places(self, width: int, times: int) -> tuple[Tensor, Tensor]:
        """The rows and positions of all tokens; the same tensors for all sites of the batch."""
        if (width, times) not in self._everywhere:
            rows = torch.arange(self.start, self.start + self.rows).repeat_interleave(width * times)
            positions = torch.arange(width).repeat_interleave(times).repeat(self.rows)
            self._everywhere[width, times] = rows, positions
        return self._everywhere[width, times]

    def by_row(self, name: str, value: Any, heads: Where = unknown) -> Any:
        """The tokens of each row, where a value has any; what is made of all tokens of a row stays as it is."""
        if isinstance(value, Rows):
            self._of_rows(name, value)  # which says what is missing
        # A transform that was told of the tokens has left some out already: then nothing is known any more.
        if not isinstance(value, Tensor) or value.is_nested or value.dim() < 3 or padding.known() is None:
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
        if mask is None:
            return Rows(first.unbind())
        # Counted on the host, as above.
        places = mask.reshape(-1).nonzero().squeeze(1)
        chosen = first.flatten(0, 1).index_select(0, places.to(first.device, non_blocking=True))
        return Rows(chosen.split(mask.sum(1).tolist()))

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
        """Which positions are taken, ``(rows, width)``; ``None`` for all."""
        known = padding.known()
        if known is None or value.dim() < 2 or (value.dim() == 2 and width == 1):
            return None
        if not isinstance(known, Left):
            return known.at(self.rows, width)
        # One value for each row was made of all tokens, and none can be left out.
        made_of_all = width == 1 and not known.fits(self.rows, 1)
        return None if made_of_all else known.kept(self.rows, width)

    def _of_rows(self, name: str, value: Rows) -> Block:
        check_number_of_rows(name, value, self.rows)
        if isinstance(padding.known(), Left):
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
