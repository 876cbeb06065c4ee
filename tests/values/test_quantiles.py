"""The bound of a sketch holds for every order of values, and few values are exact. The oracle is numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values.quantiles import Sketch

SHARES = (0.0, 0.001, 0.01, 0.25, 0.5, 0.731, 0.99, 1.0)


def values(kind: str, n: int) -> Tensor:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) * 10
    if kind == "ascending":
        return x.sort(0).values
    if kind == "descending":
        return x.sort(0, descending=True).values
    if kind == "ties":
        return (x / 10).round()
    if kind == "waves":
        return torch.sin(torch.arange(n)[:, None] * torch.tensor([0.1, 1.0, 3.0]))
    return x


def off(sketch: Sketch, x: Tensor, q: float) -> float:
    """By how many values the rank of a quantile is off."""
    found, wanted = sketch.quantile(q), q * (len(x) - 1)
    below, up_to = (x.double() < found).sum(0), (x.double() <= found).sum(0)
    return float(torch.maximum(below - wanted - 1, wanted - up_to).clamp(min=0).max())


@pytest.mark.parametrize("kind", ["random", "ascending", "descending", "ties", "waves"])
@pytest.mark.parametrize("n", [1, 2, 17, 127, 128, 255, 1000, 20_000])
def test_ranks_are_off_by_no_more_than_the_bound(kind: str, n: int) -> None:
    x, sketch = values(kind, n), Sketch(128)
    for part in x.split(37):
        sketch.add(part)
    assert sketch.count == n
    assert sketch.rank_error <= max(0.0, math.log2(max(1, n / 128))) / (2 * 128) + 1 / n
    assert all(off(sketch, x, q) <= sketch.rank_error * n for q in SHARES)


@pytest.mark.parametrize("n", [1, 2, 50, 128, 255])
def test_few_values_are_exact(n: int) -> None:
    x, sketch = values("random", n), Sketch(128)
    sketch.add(x)
    assert sketch.rank_error == 0
    for q in SHARES:
        np.testing.assert_allclose(sketch.quantile(q), np.quantile(x.double().numpy(), q, axis=0), rtol=1e-14)


def test_two_sketches_merge_into_one_of_all_values_within_the_bound() -> None:
    x = values("random", 9000)
    parts = x.split([4000, 130, 4870])
    whole = Sketch(128)
    for part in parts:
        one = Sketch(128)
        one.add(part)
        whole.merge(one)
    assert whole.count == 9000
    assert whole.rank_error <= math.log2(9000 / 128) / 256 + 1 / 9000
    assert all(off(whole, x, q) <= whole.rank_error * 9000 for q in SHARES)


def test_what_is_kept_makes_the_same_sketch_again() -> None:
    x, sketch = values("random", 5000), Sketch(64)
    sketch.add(x[:4990])
    again = Sketch.of(64, *sketch.kept(), sketch.error)
    for one in (sketch, again):
        one.add(x[4990:])
    assert again.count == sketch.count == 5000
    assert again.rank_error == sketch.rank_error
    assert all(torch.equal(again.quantile(q), sketch.quantile(q)) for q in SHARES)


def test_memory_grows_with_the_logarithm_of_the_count_alone() -> None:
    sketch = Sketch(32)
    for _ in range(100):
        sketch.add(torch.randn(1000, 2))
    assert sketch.kept()[0].shape[1] <= 32 * (math.log2(100_000 / 32) + 2)
    assert int(sketch.kept()[1].sum()) == 100_000


def test_nothing_has_no_quantiles() -> None:
    assert Sketch(32).quantile(0.5).isnan().all()


def test_quantiles_among_infinities_are_infinite() -> None:
    sketch, inf = Sketch(32), math.inf
    sketch.add(torch.tensor([[-inf], [-inf], [-inf], [2.0], [3.0], [inf], [inf]]))
    assert [float(sketch.quantile(q)) for q in (0.0, 0.2, 0.5, 0.9, 1.0)] == [-inf, -inf, 2.0, inf, inf]
