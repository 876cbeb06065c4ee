"""Means, spreads and norms against numpy in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values import moments
from torchhook._values.elements import flatten
from torchhook._values.moments import Moments, distance, exact, mean_and_variance, merged, norm, rms

INF, NAN = math.inf, math.nan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(array: Any) -> Moments:
    return Moments(array.size, float(array.mean()), float(((array - array.mean()) ** 2).sum()))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PIECE", 7)
    monkeypatch.setattr(moments, "_WHOLE", 10)
    monkeypatch.setattr(moments, "_DOUBLED", 9)


# -- several values taken together ----------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_parts_of_any_size_have_the_moments_of_the_whole(shift: float) -> None:
    array = randn(100).double().numpy() + shift
    found = merged([of(part) for part in np.split(array, [1, 3, 40, 99])])
    assert found.size == 100
    assert found.mean == pytest.approx(array.mean(), rel=1e-14)
    assert found.std == pytest.approx(array.std(), rel=1e-9)
    assert found.norm == pytest.approx(np.linalg.norm(array), rel=1e-12)


def test_one_part_is_what_it_was() -> None:
    assert merged([Moments(3, 0.1, 0.2)]) == Moments(3, 0.1, 0.2)


def test_channels_are_merged_each_for_itself() -> None:
    x = randn(50, 4).double()
    parts = [Moments(len(p), p.mean(0), (p - p.mean(0)).square().sum(0)) for p in x.split([7, 1, 42])]
    found = merged(parts)
    np.testing.assert_allclose(found.mean, x.numpy().mean(0))
    np.testing.assert_allclose(found.squares / 50, x.numpy().var(0))


def test_covariances_merge_one_after_the_other() -> None:
    x = randn(60, 3).double() * torch.tensor([1.0, 5.0, 0.1]) + 3
    running: Moments | None = None
    for part in x.split(13):
        gaps = part - part.mean(0)
        block = Moments(len(part), part.mean(0), gaps.T @ gaps)
        running = block if running is None else merged([running, block])
    assert running is not None
    np.testing.assert_allclose(running.squares / 59, np.cov(x.numpy().T))


def test_an_infinite_mean_stays_infinite() -> None:
    assert merged([Moments(1, INF, 0.0), Moments(2, INF, 0.0), Moments(1, 0.0, 0.0)]).mean == INF
    assert math.isnan(merged([Moments(1, INF, 0.0), Moments(1, -INF, 0.0)]).mean)
    assert math.isnan(Moments(1, 1.0, NAN).std)


# -- in double precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_exact_moments_are_those_of_numpy(dtype: torch.dtype, shift: float, small_pieces: None) -> None:
    tensor = (randn(5, 11) + shift).to(dtype)
    array = tensor.double().numpy()
    found = exact(tensor)
    assert found.size == 55
    assert (found.mean, found.std) == (pytest.approx(array.mean(), rel=1e-13), pytest.approx(array.std(), rel=1e-10))
    assert found.norm == pytest.approx(np.linalg.norm(array), rel=1e-13)


def test_exact_moments_have_room_for_squares() -> None:
    assert exact(torch.tensor([-3e38, 3e38])).std == pytest.approx(3e38, rel=1e-6)
    assert exact(torch.tensor([1e-38, 3e-38])).std == pytest.approx(1e-38, rel=1e-6)


def test_rms_of_nothing_is_nothing() -> None:
    assert rms(torch.tensor([3.0, -3.0])) == pytest.approx(3.0, rel=1e-12)
    assert rms(None) is None
    assert rms(torch.tensor([float("nan")])) is None
    for tensor in (torch.empty(0), torch.empty(3, device="meta"), torch.tensor([1.0, INF])):
        assert rms(tensor) is None


@pytest.mark.parametrize("value", [1e25, 1e-25, 3.0])
def test_rms_has_room_for_squares(value: float) -> None:
    assert rms(torch.full((9,), value)) == pytest.approx(value, rel=1e-6)


# -- in few passes --------------------------------------------------------------------------------------


def spread(tensor: Tensor) -> tuple[float, float]:
    flat = flatten(tensor)
    mean, variance = mean_and_variance(flat, *torch.aminmax(flat))
    return float(mean), float(variance)


def test_the_spread_around_a_large_mean_is_not_lost() -> None:
    tensor = 1e4 + randn(4096)
    array = tensor.double().numpy()
    assert spread(tensor) == (pytest.approx(array.mean(), rel=1e-6), pytest.approx(array.var(), rel=1e-4))


@pytest.mark.parametrize("size", [1, 6, 7, 8, 10, 11, 70, 71])
def test_pieces_leave_nobody_out(size: int, small_pieces: None) -> None:
    one, two = randn(size), randn(size, seed=1)
    array = one.double().numpy()
    assert spread(one) == (pytest.approx(array.mean(), abs=1e-6), pytest.approx(array.var(), rel=1e-5, abs=1e-12))
    assert float(norm(one)) == pytest.approx(np.linalg.norm(array), rel=1e-5)
    gap = np.linalg.norm(array - two.double().numpy())
    assert float(distance(one, two)) == pytest.approx(gap, rel=1e-5)


def test_millions_of_squares_are_summed_as_exactly_as_few() -> None:
    tensor = torch.rand(5_000_000, generator=torch.Generator().manual_seed(0)).square_()
    array = tensor.double().numpy()
    assert spread(tensor) == (pytest.approx(array.mean(), rel=1e-5), pytest.approx(array.var(), rel=1e-5))
    assert float(norm(tensor)) == pytest.approx(np.linalg.norm(array), rel=1e-6)


@pytest.mark.parametrize("size", [1e25, 3e37, 1e-23, 1e-36, 1e-42])
def test_squares_that_single_precision_cannot_hold_are_taken_in_double(size: float) -> None:
    tensor = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * size
    array = tensor.double().numpy()
    assert spread(tensor) == (pytest.approx(array.mean(), rel=1e-5, abs=0), pytest.approx(array.var(), rel=1e-4, abs=0))
    assert float(norm(tensor)) == pytest.approx(np.linalg.norm(array), rel=1e-5, abs=0)
    assert float(distance(tensor, tensor / 2)) == pytest.approx(np.linalg.norm(array) / 2, rel=1e-4, abs=0)


@pytest.mark.parametrize(
    ("values", "size"), [([0.0, 0.0], 0.0), ([INF, 1.0], INF), ([-INF, INF], INF), ([NAN, INF], NAN), ([NAN], NAN)]
)
def test_norms_of_nothing_and_of_what_is_no_number(values: list[float], size: float) -> None:
    assert float(norm(torch.tensor(values))) == pytest.approx(size, nan_ok=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.float16),
        lambda x: x.to(torch.float8_e5m2),
        lambda x: (x * 100).to(torch.int64),
        lambda x: x > 0,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 3)[::2],
        lambda x: torch.complex(x, x),
    ],
    ids=["float16", "float8", "int64", "bool", "channels_last", "strided", "complex"],
)
def test_tensors_of_every_kind_have_a_norm_and_a_spread(change: Callable[[Tensor], Tensor]) -> None:
    tensor = change(randn(2, 3, 4, 5))
    array = tensor.abs().numpy() if tensor.is_complex() else tensor.to(torch.float64).numpy()
    assert spread(tensor) == (pytest.approx(array.mean(), abs=1e-5), pytest.approx(array.var(), rel=1e-5))
    assert float(norm(tensor)) == pytest.approx(np.linalg.norm(array), rel=1e-5)


def test_third_and_fourth_moments_merge_as_if_all_values_were_seen_at_once() -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).double() + 50

    def of(part: torch.Tensor) -> Moments:
        gaps = part - part.mean(0)
        return Moments(len(part), part.mean(0), *((gaps**power).sum(0) for power in (2, 3, 4)))

    found, wanted = merged([of(part) for part in x.split([1, 60, 7, 32])]), of(x)
    assert found.size == 100
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10)


def test_channels_may_have_different_numbers_of_values_and_none() -> None:
    one = Moments(torch.tensor([2, 0, 1]), torch.tensor([1.0, 0.0, 5.0]), torch.tensor([2.0, 0.0, 0.0]))
    other = Moments(torch.tensor([1, 0, 1]), torch.tensor([4.0, 0.0, 7.0]), torch.tensor([0.0, 0.0, 0.0]))
    found = merged([one, other])
    assert found.size.tolist() == [3, 0, 2]
    assert found.mean.tolist() == [2.0, 0.0, 6.0]
    assert found.squares.tolist() == [8.0, 0.0, 2.0]
