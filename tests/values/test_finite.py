"""NaN and Inf: found wherever they are, and never where a sum alone overflows."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values.finite import finite, may_be_bad, probe

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "complex64"])
def test_one_bad_value_among_many_shows(name: str, bad: float) -> None:
    tensor = torch.ones(1000).to(getattr(torch, name))
    assert probe(tensor) is False
    tensor[123] = bad
    assert probe(tensor) is True
    assert may_be_bad(tensor)


def test_infinities_that_cancel_show_too() -> None:
    assert probe(torch.tensor([INF, -INF])) is True


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_values_of_sparse_tensors_are_looked_at(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compressed layouts are in beta
        good, bad = (getattr(torch.tensor([[0.0, value]]), kind)() for value in (1.0, NAN))
    assert (probe(good), probe(bad)) == (False, True)


@pytest.mark.parametrize(
    "tensor", [torch.tensor([2**62, 2**62]), torch.tensor([True]), torch.empty(0), torch.empty(2, device="meta")]
)
def test_what_has_no_such_values_is_never_bad(tensor: Tensor) -> None:
    assert probe(tensor) is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    assert probe(torch.full((1000,), 60000.0, dtype=dtype)) is False


def test_a_sum_that_overflows_may_be_bad_and_its_terms_are_not() -> None:
    tensor = torch.full((100,), torch.finfo(torch.float32).max)
    assert may_be_bad(tensor)
    assert finite(tensor).bad == 0


def test_fake_tensors_are_never_bad() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert probe(torch.ones(3)) is False


def test_bad_values_are_counted_by_kind_and_left_out() -> None:
    tensor = torch.tensor([[1.0, NAN, INF], [-INF, NAN, 0.0]])
    found = finite(tensor)
    assert found.values.tolist() == [1.0, 0.0]
    assert (found.nans, found.pos_infs, found.neg_infs, found.bad) == (2, 1, 1, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_finite_values_are_those_of_numpy(dtype: torch.dtype, layout: torch.memory_format) -> None:
    tensor = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype).to(memory_format=layout)
    tensor[0, 1, 2], tensor[1, 2, :, 3] = NAN, -INF
    array = tensor.double().numpy()
    found = finite(tensor)
    np.testing.assert_array_equal(np.sort(found.values.double()), np.sort(array[np.isfinite(array)]))
    assert (found.nans, found.neg_infs) == (np.isnan(array).sum(), np.isneginf(array).sum())


def test_where_all_is_finite_nothing_is_copied() -> None:
    tensor = torch.randn(3, 4)
    assert finite(tensor).values.data_ptr() == tensor.data_ptr()


def test_nothing_has_no_finite_values() -> None:
    assert finite(torch.empty(2, 0)).values.numel() == 0
