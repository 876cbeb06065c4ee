"""Running statistics are numpy's of all values at once, in whatever parts these come."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values import running
from torchhook._values.running import PER, Block, Running

LENGTHS = [7, 3, 5, 1, 7, 2, 6, 4, 7]
MASK = torch.arange(7) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture(params=[0.0, 1e6], ids=["around zero", "far from zero"])
def x(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(9, 7, 11, generator=torch.Generator().manual_seed(0)).double() * 3 + request.param


def block(x: Tensor, low: int, high: int) -> Block:
    places = MASK[low:high].nonzero()
    return Block(x[low:high][MASK[low:high]], places[:, 0] + low, places[:, 1])


def groups(x: Tensor, per: str) -> list[np.ndarray]:
    values, mask = x.numpy(), MASK.numpy()
    if per == "channel":
        return list(values[mask].T)
    return [values[mask].ravel()] if per == "tensor" else [values[:, p][mask[:, p]].ravel() for p in range(7)]


def made(x: Tensor, per: str, cuts: list[int]) -> Running:
    found = Running(per, covariance=per == "channel", top=3, resolution=1024)
    for low, high in itertools.pairwise(cuts):
        found.add(block(x, low, high))
    return found


def check(found: Running, x: Tensor, per: str) -> None:
    wanted = groups(x, per)
    np.testing.assert_array_equal(torch.as_tensor(found.moments.size).expand(len(wanted)), [len(g) for g in wanted])
    np.testing.assert_allclose(found.mean, [g.mean() for g in wanted], rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(found.variance(), [g.var(ddof=1) for g in wanted], rtol=1e-8)
    fourth = [(((g - g.mean()) / g.std()) ** 4).mean() for g in wanted]
    np.testing.assert_allclose(found.kurtosis(), fourth, rtol=1e-7)
    np.testing.assert_array_equal(found.min, [g.min() for g in wanted])
    np.testing.assert_array_equal(found.max, [g.max() for g in wanted])
    np.testing.assert_allclose(found.quantile(0.3), [np.quantile(g, 0.3) for g in wanted], rtol=1e-12)
    if per == "channel":
        np.testing.assert_allclose(found.matrix(), np.cov(np.stack(wanted)), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cuts", [[0, 9], [0, 2, 4, 6, 8, 9], list(range(10))])
def test_parts_in_turn_give_what_numpy_gives_of_all(x: Tensor, per: str, cuts: list[int]) -> None:
    check(made(x, per, cuts), x, per)


@pytest.mark.parametrize("per", PER)
def test_two_that_saw_parts_merge_into_one_that_saw_all(x: Tensor, per: str) -> None:
    one, other, whole = made(x, per, [0, 2, 5]), made(x, per, [5, 9]), made(x, per, [0, 9])
    one.merge(other)
    check(one, x, per)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.top, whole.top, strict=True))


@pytest.mark.parametrize("per", PER)
def test_what_is_written_makes_the_same_again(x: Tensor, per: str) -> None:
    one = made(x, per, [0, 4, 9])
    again = one.on_host()
    check(again, x, per)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.top, again.top, strict=True))


def test_small_pieces_and_large_ones_are_the_same(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PIECE", {"cpu": 40})
    for per in PER:
        check(made(x, per, [0, 9]), x, per)


def test_the_top_rows_are_those_with_the_largest_values_once_each(x: Tensor) -> None:
    found = made(x, "channel", [0, 3, 9]).top
    by_row = torch.stack([x[i, :n].amax(0) for i, n in enumerate(LENGTHS)])
    values, rows = by_row.topk(3, dim=0)
    assert torch.equal(found.values, values.T)
    assert torch.equal(found.rows, rows.T)
    for channel in range(11):
        for value, row, at in zip(*(part[channel].tolist() for part in found), strict=True):
            assert x[row, at, channel] == value


def test_of_equal_values_the_first_rows_win_in_any_order_of_the_parts() -> None:
    ones = Block(torch.ones(4, 1), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    later = Running("channel", top=2)
    later.add(ones._replace(rows=torch.arange(4, 8)))
    first = Running("channel", top=2)
    first.add(ones)
    later.merge(first)
    assert later.top.rows.tolist() == [[0, 1]]


def test_positions_have_rows_of_their_own_and_none_where_rows_are_short(x: Tensor) -> None:
    found = made(x, "token", [0, 4, 9]).top
    assert found.rows.shape == (7, 3)
    for position in range(7):
        has = [i for i, n in enumerate(LENGTHS) if n > position]
        best = sorted(has, key=lambda i, p=position: -float(x[i, p].max()))[:3]
        assert found.rows[position].tolist() == best + [-1] * (3 - len(best))


def test_a_nan_is_told_in_its_channel_and_in_no_other() -> None:
    values = torch.randn(50, 3)
    values[7, 1] = float("nan")
    found = Running("channel", top=1, resolution=64)
    found.add(Block(values, torch.arange(50), torch.zeros(50, dtype=torch.int64)))
    for numbers in (found.mean, found.variance(), found.min, found.max, found.quantile(0.5), found.kurtosis()):
        assert numbers.isnan().tolist() == [False, True, False]
    assert found.top.rows[1, 0] == 7


def test_halves_and_whole_numbers_are_summed_in_double() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.bool):
        values = (torch.randn(4000, 2) * 3).to(dtype)
        found = Running("channel", resolution=4096)
        found.add(Block(values, torch.arange(4000), torch.zeros(4000, dtype=torch.int64)))
        exact = values.double().numpy()
        np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.variance(), exact.var(0, ddof=1), rtol=1e-10)
        np.testing.assert_array_equal(found.quantile(0.5), np.quantile(exact, 0.5, axis=0))


@pytest.mark.parametrize("start", [2**24, 2**40])
def test_whole_numbers_that_single_precision_has_no_room_for_are_not_rounded(start: int) -> None:
    values = start + torch.arange(50)[:, None]
    found = Running("channel", resolution=64, top=1)
    found.add(Block(values, torch.arange(50), torch.zeros(50, dtype=torch.int64)))
    exact = values.double().numpy()
    np.testing.assert_allclose(found.variance(), exact.var(0, ddof=1), rtol=1e-12)
    np.testing.assert_array_equal(found.max, exact.max(0))
    np.testing.assert_array_equal(found.top.values[:, 0], exact.max(0))
    np.testing.assert_array_equal(found.quantile(0.25), np.quantile(exact, 0.25, axis=0))
