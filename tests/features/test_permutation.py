"""An order that is computed is one: every number once, other for other seeds, and no number at home in its place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from torchhook._features.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 4097, 65_536])
def test_every_number_comes_once(size: int) -> None:
    found = Permutation(size, (3, 0))(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_parts_of_an_order_are_parts_of_the_whole() -> None:
    order = Permutation(1000, 5)
    whole = order(np.arange(1000))
    assert np.array_equal(order(np.array([7, 999, 7])), whole[[7, 999, 7]])
    assert not np.array_equal(whole, Permutation(1000, 6)(np.arange(1000)))
    assert np.array_equal(whole, Permutation(1000, 5)(np.arange(1000)))


def test_of_four_things_all_orders_are_about_equally_likely() -> None:
    times = Counter(tuple(Permutation(4, (seed, 0))(np.arange(4)).tolist()) for seed in range(4800))
    assert len(times) == 24
    expected = 200
    # 23 degrees of freedom: beyond 60 once in 30,000 times.
    assert sum((count - expected) ** 2 / expected for count in times.values()) < 60


def test_neighbours_are_torn_apart() -> None:
    found = Permutation(100_000, 1)(np.arange(100_000))
    assert abs(np.corrcoef(found, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02
    assert abs(np.abs(np.diff(found)).mean() / 100_000 - 1 / 3) < 0.01


def test_a_billion_needs_no_memory() -> None:
    found = Permutation(10**9, 1)(np.arange(10**9 - 4096, 10**9))
    assert len(set(found.tolist())) == 4096
    assert found.min() >= 0
    assert found.max() < 10**9
