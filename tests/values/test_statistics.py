"""Statistics against numpy: those that are shown, those of rows, and those of a training step, on and off the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values.elements import flatten
from torchhook._values.finite import finite
from torchhook._values.histograms import Histogram
from torchhook._values.statistics import Measure, Measured, by_row, summarize, summary

INF, NAN = math.inf, math.nan
ALL = ("mean", "std", "min", "max", "zeros", "nans", "norm", "histogram")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.double() + 1e6,
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "int64": lambda x: (x * 3).long(),
    "uint8": lambda x: (x.abs() * 3).to(torch.uint8),
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x, -x).conj(),
    "quantized": quantized,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "strided": lambda x: x.transpose(1, 3)[:, ::2],
    "expanded": lambda x: x[:1].expand(4, 4, 5, 6),
    "huge": lambda x: x * 1e37,
    "tiny": lambda x: x * 1e-36,
}
kinds = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


def numbers(tensor: Tensor) -> Any:
    """The values that are measured, in double precision."""
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.abs() if tensor.is_complex() else tensor
    return tensor.to(torch.float64).numpy()


def sample() -> Tensor:
    x = randn(2, 4, 5, 6)
    x[0, 1, 2:4] = 0
    return x


# -- to be shown --------------------------------------------------------------------------------------


@kinds
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_summary_is_that_of_numpy(change: Callable[[Tensor], Tensor]) -> None:
    tensor = change(sample())
    array, found = numbers(tensor), summary(flatten(tensor))
    assert (found.size, found.nans, found.pos_infs, found.neg_infs) == (array.size, 0, 0, 0)
    assert found.zeros == (array == 0).sum()
    assert (found.min, found.max) == (array.min(), array.max())
    assert found.mean == pytest.approx(array.mean(), rel=1e-12, abs=1e-13 * np.abs(array).max())
    assert found.std == pytest.approx(array.std(), rel=1e-9, abs=0)
    assert found.norm == pytest.approx(np.linalg.norm(array), rel=1e-12, abs=0)


def test_a_summary_is_of_the_finite_values_and_counts_the_others() -> None:
    found = summary(torch.tensor([[1.0, NAN, 3.0], [INF, -INF, 0.0]]))
    assert (found.size, found.nans, found.pos_infs, found.neg_infs, found.zeros) == (6, 1, 1, 1, 1)
    assert (found.min, found.max, found.mean) == (0.0, 3.0, pytest.approx(4 / 3))
    assert found.norm == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.full((4,), NAN), torch.tensor([INF])])
def test_without_finite_values_there_are_counts_only(tensor: Tensor) -> None:
    found = summary(finite(tensor))
    assert found.size == tensor.numel()
    assert found[5:] == (None,) * 5


# -- of rows ------------------------------------------------------------------------------------------


@kinds
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_rows_have_the_statistics_of_numpy(change: Callable[[Tensor], Tensor]) -> None:
    tensor = change(sample())
    array, found = numbers(tensor), by_row(tensor)
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    rel = 1e-2 if half else 1e-4
    slack = rel * float(np.abs(array).max())
    dims = (1, 2, 3)
    np.testing.assert_allclose(found["mean"].double(), array.mean(dims), rtol=rel, atol=slack)
    np.testing.assert_allclose(found["min"].double(), array.min(dims), rtol=1e-6)
    np.testing.assert_allclose(found["max"].double(), array.max(dims), rtol=1e-6)
    np.testing.assert_allclose(found["zeros"], (array == 0).mean(dims), rtol=1e-6)
    if np.abs(array).max() < 1e30 and np.abs(array).max() > 1e-30:  # squares are taken in the tensor's own precision
        np.testing.assert_allclose(found["std"].double(), array.std(dims), rtol=rel, atol=1e-6)


def test_rows_of_one_number_and_other_dims_have_statistics() -> None:
    assert by_row(torch.tensor([3, 0]))["zeros"].tolist() == [0.0, 1.0]
    x = sample()
    np.testing.assert_allclose(by_row(x, (0, 2))["mean"], x.numpy().mean((0, 2)), rtol=1e-5, atol=1e-6)


def test_half_precision_stays_half() -> None:
    assert by_row(torch.ones(2, 3, dtype=torch.float16))["mean"].dtype == torch.float16


# -- of a training step -------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor that says it is not on the CPU, and fails where a device would be waited for."""

    is_cpu = False  # type: ignore[assignment]

    def _waits(self, *_: Any) -> Any:
        raise AssertionError("this waits for the device")

    __bool__ = __float__ = __int__ = item = tolist = nonzero = _waits


def taken(measure: Measure, tensor: Tensor) -> Measured:
    return measure(tensor).map(lambda value: value.as_subclass(Tensor).tolist())


def assert_statistics(found: dict[str, Any], array: Any) -> None:
    size = float(np.abs(array).max())
    assert found["mean"] == pytest.approx(array.mean(), rel=1e-5, abs=1e-6 * size)
    assert found["std"] == pytest.approx(array.std(), rel=1e-4, abs=0)
    assert found["norm"] == pytest.approx(np.linalg.norm(array), rel=1e-5, abs=0)
    assert (found["min"], found["max"]) == (array.min(), array.max())
    assert found["zeros"] == pytest.approx((array == 0).mean(), abs=1e-7)
    assert found["nans"] == 0
    counts, edges = np.histogram(array, bins=8)
    assert np.abs(np.array(found["histogram"].counts) - counts).sum() <= 4  # values beside an edge
    assert found["histogram"].edges == pytest.approx(edges.tolist(), rel=1e-5, abs=1e-6 * size)


@kinds
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_measured_on_the_cpu_every_kind_of_tensor_has_the_statistics_of_numpy(
    change: Callable[[Tensor], Tensor],
) -> None:
    tensor = change(sample())
    assert_statistics(summarize([taken(Measure(ALL, 8), tensor)], ALL), numbers(tensor))


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int64", "bool", "channels_last", "strided"])
def test_off_the_cpu_the_statistics_are_the_same_and_nothing_is_waited_for(name: str) -> None:
    tensor = CHANGES[name](sample())
    found = summarize([taken(Measure(ALL, 8), tensor.as_subclass(Elsewhere))], ALL)
    assert_statistics(found, numbers(tensor))


@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
@pytest.mark.parametrize("values", [[0.0, NAN, 1.0, NAN], [INF, 0.0], [INF, -INF, 1.0], [INF, NAN]])
def test_what_is_not_finite_is_counted_and_not_hidden(values: list[float], kind: Any) -> None:
    array = np.array(values)
    found = summarize([taken(Measure(ALL, 4), torch.tensor(values).as_subclass(kind))], ALL)
    assert found["nans"] == np.isnan(array).sum()
    assert found["zeros"] == (array == 0).mean()
    assert not math.isfinite(found["mean"])
    assert math.isnan(found["std"])
    assert found["norm"] == pytest.approx(math.sqrt((array**2).sum()), nan_ok=True)
    assert found["max"] == pytest.approx(array.max(), nan_ok=True)
    if np.isfinite(array).any():
        assert sum(found["histogram"].counts) == np.isfinite(array).sum()
    else:
        assert "histogram" not in found


@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
def test_a_histogram_of_huge_values_loses_nobody(kind: Any) -> None:
    values = torch.tensor([-3e38, -1e38, 0.0, 0.0, 3e38, NAN]).as_subclass(kind)
    found = summarize([taken(Measure(["histogram"], 4), values)], ["histogram"])["histogram"]
    assert found.counts == [1, 1, 2, 1]
    assert found.edges == pytest.approx([-3e38, -1.5e38, 0.0, 1.5e38, 3e38], rel=1e-6, abs=1e31)


def test_several_values_are_taken_together() -> None:
    parts = [randn(50), randn(7, seed=1) * 3 + 5, torch.zeros(3)]
    measure = Measure(ALL, 8)
    found = summarize([taken(measure, part) for part in parts], ALL)
    array = torch.cat(parts).double().numpy()
    for name, value in {
        "mean": array.mean(),
        "std": array.std(),
        "norm": np.linalg.norm(array),
        "min": array.min(),
        "max": array.max(),
        "zeros": (array == 0).mean(),
    }.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert sum(found["histogram"].counts) == 60


@pytest.mark.parametrize("name", [*ALL, "dead"])
def test_only_what_is_wanted_is_given(name: str) -> None:
    measure = Measure([name], 4)
    assert measure.needed == (name != "dead")
    found = summarize([taken(measure, torch.ones(3))], [name])
    assert list(found) == ([name] if name != "dead" else [])


def test_what_was_not_asked_for_is_not_taken() -> None:
    assert Measure(["mean"], 4)(torch.ones(3))[2:] == (None,) * 8


def test_equal_values_are_all_in_the_first_bin() -> None:
    found = summarize([taken(Measure(["histogram"], 4), torch.tensor([2.0, 2.0, NAN]))], ["histogram"])
    assert found["histogram"] == Histogram([2, 0, 0, 0], [2.0] * 5)
