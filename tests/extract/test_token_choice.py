"""Which tokens of a value are taken, and where they are said to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchhook._extract.special_tokens import Left
from torchhook._extract.token_choice import TokenChoice
from torchhook._values.padding import given, knowing
from torchhook._values.running import Block
from torchhook.errors import ExtractError
from torchhook.transforms import Rows

IDS = torch.tensor([[1, 5, 6, 0], [1, 7, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def choice(channel: int | None = None, maps: bool = False) -> TokenChoice:
    return TokenChoice(2, 10, channel, maps)


def left(*special: int, ids: Tensor = IDS, mask: Tensor | None = None) -> Left:
    return Left("h", None if mask is None else given("lengths=", mask, 2), [ids], frozenset(special))


def where(block: Block) -> list[tuple[int, int]]:
    return list(zip(block.rows.tolist(), block.positions.tolist(), strict=True))


def test_all_positions_are_tokens_where_nothing_is_known_of_padding() -> None:
    value = torch.randn(2, 4, 3)
    block = choice()("h", value)
    assert torch.equal(block.tokens, value.flatten(0, 1))
    assert where(block) == [(row, at) for row in (10, 11) for at in range(4)]


@pytest.mark.parametrize("flip", [False, True])
def test_padding_is_left_out_and_positions_are_counted_without_it(flip: bool) -> None:
    value, mask = torch.randn(2, 4, 3), MASK.flip(1) if flip else MASK
    with knowing(given("lengths=", mask, 2)):
        block = choice()("h", value)
    assert torch.equal(block.tokens, value[mask.bool()])
    assert where(block) == [(10, 0), (10, 1), (10, 2), (11, 0), (11, 1)]


def test_positions_are_counted_among_the_tokens_that_are_left() -> None:
    value = torch.randn(2, 4, 3)
    with knowing(left(1, mask=MASK)):
        block = choice()("h", value)
    assert torch.equal(block.tokens, value[(MASK == 1) & (IDS != 1)])
    assert where(block) == [(10, 0), (10, 1), (11, 0)]


def test_a_batch_of_one_token_each_has_special_ones_too() -> None:
    ids, value = torch.tensor([[1], [7]]), torch.randn(2, 1, 3)
    with knowing(left(1, ids=ids)):
        block = choice()("h", value)
        assert torch.equal(block.tokens, value[1])
        assert where(block) == [(11, 0)]
        # What is made of all the tokens of a row is none of them.
        pooled = torch.randn(2, 3)
        assert torch.equal(choice()("pooler", pooled).tokens, pooled)
    with knowing(left(1)):
        assert torch.equal(choice()("pooler", value).tokens, value[:, 0])


def test_rows_and_positions_in_one_dim_are_told_apart_by_the_rows_of_the_batch() -> None:
    value = torch.randn(8, 3)  # as a router of experts gives them
    with knowing(given("lengths=", MASK, 2)):
        block = choice()("router", value)
    assert torch.equal(block.tokens, value[MASK.flatten().bool()])
    pooled = torch.randn(2, 3)
    with knowing(left(1, mask=MASK)):
        assert torch.equal(choice()("router", value).tokens, value[((MASK == 1) & (IDS != 1)).flatten()])
        assert torch.equal(choice()("pooler", pooled).tokens, pooled)
    with pytest.raises(ExtractError, match="'h': 3 rows for a batch of 2"):
        choice()("h", torch.randn(3, 3))


def test_heads_of_a_token_are_at_its_position_and_pixels_of_a_map_at_their_own() -> None:
    heads = torch.randn(2, 4, 2, 3)
    with knowing(given("lengths=", MASK, 2)):
        block = choice(maps=True)("q", heads)
    assert torch.equal(block.tokens, heads[MASK.bool()].flatten(0, 1))
    assert where(block)[:4] == [(10, 0), (10, 0), (10, 1), (10, 1)]
    image = torch.randn(2, 3, 2, 2)
    block = choice(maps=True)("conv", image)
    assert torch.equal(block.tokens, image.permute(0, 2, 3, 1).flatten(0, 2))
    assert where(block)[:5] == [(10, 0), (10, 1), (10, 2), (10, 3), (11, 0)]
    with pytest.raises(ExtractError, match="no rows of tokens"):
        choice()("conv", image)


def test_as_many_heads_as_positions_cannot_be_told_from_them() -> None:
    """``(N, T, heads, D)`` or, as the fused attention gives it, ``(N, heads, T, D)``."""
    with knowing(given("lengths=", MASK, 2)):
        with pytest.raises(
            ExtractError, match=r"'h': positions may be dim 1 or dim 2 of a value of shape \(2, 4, 4, 3\)"
        ):
            choice(maps=True)("h", torch.randn(2, 4, 4, 3))
        value = torch.randn(2, 4, 4, 3)
        block = choice(maps=True)("h", value.transpose(1, 2).flatten(2))
    assert torch.equal(block.tokens, value.transpose(1, 2).flatten(2)[MASK.bool()])


def test_rows_of_a_transforms_own_making_are_taken_as_they_are() -> None:
    rows = Rows([torch.randn(3, 2), torch.randn(1, 2)])
    block = choice()("h", rows)
    assert torch.equal(block.tokens, torch.cat(list(rows)))
    assert where(block) == [(10, 0), (10, 1), (10, 2), (11, 0)]
    with knowing(left(1)), pytest.raises(ExtractError, match="no token ids to drop by"):
        choice()("h", rows)


def test_a_layer_of_another_width_says_that_its_padding_is_not_known() -> None:
    with knowing(given("lengths=", MASK, 2)), pytest.raises(ExtractError, match=r"'h': .*With lengths=False"):
        choice()("h", torch.randn(2, 3, 5))
