"""The tokens that a transform is about: which dim they are, which of them are padding, and rows without that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchhook._values import padding
from torchhook._values.heads import KnownHeads, NoPart, token_dim
from torchhook.errors import TransformError

Where = Callable[[], KnownHeads]
"""Asks what is known of the heads at a site: only of values of four dims, which few are."""


def dim_of_tokens(tensor: Tensor, known: Where, name: str) -> int:
    """The dim of the tokens; dim 1 where no attention is around."""
    if tensor.dim() == 3:  # as nearly always: nobody need be asked
        return 1
    try:
        return token_dim(tensor.shape, known(), otherwise=1)
    except NoPart as error:
        way = "Put them next to the rows first, by a function before it: lambda value: value.transpose(1, 2)."
        raise TransformError(f"{name}: {error.why} {way}") from None


def padding_along(tensor: Tensor, dims: Sequence[int] | None, known: Where, name: str) -> tuple[Tensor | None, int]:
    """The mask of a value's tokens, and their dim; no mask where that is none of ``dims``, which are all for ``None``.

    >>> import torch
    >>> from torchhook._values.heads import unknown
    >>> with padding.knowing(padding.given("lengths=", [1, 2], 2)):
    ...     padding_along(torch.zeros(2, 2, 4), [1], unknown, "pool")[0].tolist()
    [[True, False], [True, True]]
    """
    if tensor.dim() < 3 or padding.known() is None:
        return None, 1
    time = dim_of_tokens(tensor, known, name)
    asked = dims is None or time in {dim % tensor.dim() for dim in dims}
    return (padding.mask_of(tensor, time) if asked else None), time


def unpadded(tensor: Tensor, mask: Tensor, time: int) -> list[Tensor]:
    """Each row as a batch of its own, without its padding."""
    # From the host: the device need not be waited for.
    places = [row.nonzero().squeeze(1).to(tensor.device, non_blocking=True) for row in mask]
    return [tensor[i : i + 1].index_select(time, places[i]) for i in range(len(tensor))]
