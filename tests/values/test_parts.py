"""Parts of tensors: every combination of choices against numpy's indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook._values.choices import choice
from torchhook._values.heads import KnownHeads
from torchhook._values.parts import part

KNOWN = KnownHeads("attn", queries=3, keys=3, dims=(2,), op="scaled_dot_product_attention", joined=True)


def choices(size: int) -> st.SearchStrategy[Any]:
    number = st.integers(-size, size - 1)
    several = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    ends = st.none() | st.integers(-size - 1, size + 1)
    slices = st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1, -2]))
    masks = st.lists(st.booleans(), min_size=size, max_size=size)
    return st.none() | number | several | slices | masks


def numbers(which: Any, size: int) -> np.ndarray[Any, Any]:
    return np.atleast_1d(np.arange(size)[slice(None) if which is None else which])


@settings(max_examples=300)
@given(choices(4), choices(5), choices(3), st.booleans())
def test_a_part_is_what_numpy_takes(rows: Any, positions: Any, heads: Any, split: bool) -> None:
    x = torch.randn(4, 3, 5, 2) if split else torch.randn(4, 5, 6)
    found = (
        part(x, choice(rows, "rows"), choice(positions, "positions"), choice(heads, "heads"), KNOWN)
        if any(which is not None for which in (rows, positions, heads))
        else None
    )
    if found is None:
        return
    whole = x.numpy() if split or heads is None else x.numpy().reshape(4, 5, 3, 2)
    index = [numbers(rows, 4), numbers(positions, 5)]
    if split:
        index.insert(1, numbers(heads, 3))
    elif heads is not None:
        index.append(numbers(heads, 3))
    expected = whole[np.ix_(*index)]
    assert np.array_equal(found.of(x).numpy(), expected)
    new = torch.randn(expected.shape)
    by_hand = whole.copy()
    by_hand[np.ix_(*index)] = new.numpy()
    before = x.clone()
    assert np.array_equal(found.put(x, new).numpy(), by_hand.reshape(x.shape))
    assert torch.equal(x, before)


@settings(max_examples=100)
@given(choices(4), st.lists(st.lists(st.integers(-5, 4), min_size=2, max_size=2), min_size=4, max_size=4), choices(3))
def test_lines_are_taken_row_by_row(rows: Any, lines: Any, heads: Any) -> None:
    lines = [[a, b if b % 5 != a % 5 else (b + 6) % 5] for a, b in lines]
    x = torch.randn(4, 3, 5, 2)
    found = part(x, choice(rows, "rows"), choice(lines, "positions", True), choice(heads, "heads"), KNOWN).of(x)
    chosen = [x[row][numbers(heads, 3).tolist()][:, lines[row]] for row in numbers(rows, 4).tolist()]
    assert torch.equal(found, torch.stack(chosen) if chosen else found[:0])


@settings(max_examples=100)
@given(choices(4), st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=4, max_size=4), choices(3))
def test_a_mask_is_taken_as_torch_does(rows: Any, mask: Any, heads: Any) -> None:
    x = torch.randn(4, 3, 5, 2)
    found = part(x, choice(rows, "rows"), choice(mask, "positions", True), choice(heads, "heads"), KNOWN).of(x)
    at = numbers(rows, 4).tolist()
    expected = x.transpose(1, 2)[at][torch.tensor(mask)[at]][:, numbers(heads, 3).tolist()]
    assert torch.equal(found, expected)
