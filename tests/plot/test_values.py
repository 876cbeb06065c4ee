"""From recordings and tensors to arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import torchhook as th
from torchhook.errors import MissingRecordError
from torchhook.plot.values import (
    Value,
    chosen,
    first,
    flaws,
    limits,
    maps,
    number,
    one,
    values,
)
from torchhook.types import Recording


def recorded(tensor: Tensor) -> Value:
    return Value("layer", tensor, True)


def bare(tensor: Tensor) -> Value:
    return Value("", tensor, False)


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def test_channels_first_maps_are_one_samples_channels() -> None:
    x = numbered(2, 5, 4, 4)
    np.testing.assert_array_equal(maps(recorded(x), sample=1).array, x[1].numpy())


def test_channels_last_maps_are_turned() -> None:
    x = numbered(2, 7, 7, 96)
    np.testing.assert_array_equal(maps(recorded(x)).array, x[0].permute(2, 0, 1).numpy())


@pytest.mark.parametrize("shape", [(56, 56, 96), (56, 56, 192), (28, 28, 96), (64, 64, 96), (32, 32, 64), (32, 32, 3)])
def test_a_square_of_any_side_is_the_map(shape: tuple[int, ...]) -> None:
    for x in (recorded(numbered(1, *shape)), bare(numbered(1, *shape)), bare(numbered(*shape))):
        turned = x.tensor.reshape(shape).permute(2, 0, 1)
        np.testing.assert_array_equal(maps(x).array, turned.numpy())


def test_what_looks_like_channels_first_can_be_said_to_be_channels_last() -> None:
    x = numbered(1, 4, 4, 4)
    np.testing.assert_array_equal(maps(recorded(x), layout="channels_last").array, x[0].permute(2, 0, 1).numpy())


@pytest.mark.parametrize(("prefix", "note"), [(0, ""), (1, "1 prefix token left out"), (5, "5 prefix tokens left out")])
def test_image_tokens_are_laid_out_on_their_grid(prefix: int, note: str) -> None:
    x = numbered(1, 49 + prefix, 3)
    found = maps(recorded(x))
    np.testing.assert_array_equal(found.array, x[0, prefix:].T.reshape(3, 7, 7).numpy())
    assert found.note == note


def test_a_grid_can_be_said() -> None:
    x = numbered(1, 13, 2)
    assert maps(recorded(x), grid=(3, 4)).array.shape == (2, 3, 4)
    with pytest.raises(ValueError, match="it needs 20 tokens, and there are 13"):
        maps(recorded(x), grid=(4, 5))


def test_words_are_not_an_image() -> None:
    found = maps(recorded(numbered(2, 16, 8)))
    assert found.array.shape == (1, 16, 8)
    assert found.flat


def test_a_vector_is_a_strip() -> None:
    assert maps(recorded(numbered(2, 10))).array.shape == (1, 1, 10)
    assert maps(bare(numbered(10))).array.shape == (1, 1, 10)
    assert maps(bare(torch.tensor(3.0))).array.shape == (1, 1, 1)


def test_a_bare_matrix_is_one_map_and_three_dimensions_are_channels() -> None:
    assert maps(bare(numbered(5, 6))).array.shape == (1, 5, 6)
    assert maps(bare(numbered(3, 8, 8))).array.shape == (3, 8, 8)
    assert maps(bare(numbered(2, 197, 64))).array.shape == (64, 14, 14)


def test_of_a_volume_the_middle_slice_is_shown() -> None:
    x = numbered(1, 2, 5, 6, 6)
    found = maps(recorded(x))
    np.testing.assert_array_equal(found.array, x[0, :, 2].numpy())
    assert found.note == "slice 2 of 5"


def test_a_sample_or_layout_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="sample=2: there are 2"):
        maps(recorded(numbered(2, 3, 4, 4)), sample=2)
    with pytest.raises(ValueError, match="layout='rows'"):
        maps(recorded(numbered(2, 3, 4, 4)), layout="rows")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.complex64),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, requires_grad=True),
    ],
    ids=["bfloat16", "int64", "bool", "complex64", "sparse", "requires_grad"],
)
def test_every_kind_of_tensor_becomes_plain_numbers(tensor: Tensor) -> None:
    found = first(tensor)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), np.ones((2, 3)), atol=0.1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_become_plain_numbers() -> None:
    found = first(torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), np.ones((2, 3)), atol=0.1)


def test_of_a_nested_value_the_first_floating_point_tensor_counts() -> None:
    found = first((torch.ones(2, dtype=torch.int64), {"x": torch.zeros(3)}))
    assert found is not None
    assert found.shape == (3,)
    assert first("text") is None
    assert first(torch.zeros(2, dtype=torch.uint8).view(torch.bits8)) is None


def test_values_come_by_site_and_call() -> None:
    relu = torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), relu, torch.nn.Linear(3, 2), relu)
    with th.capture(model, "*") as recording:
        model(torch.ones(1, 2))
    assert [v.name for v in values(recording)] == ["0", "1#0", "2", "1#1"]
    assert [v.name for v in values(recording, ["2", "0"])] == ["2", "0"]
    with pytest.raises(MissingRecordError):
        values(recording, "nothing")
    with pytest.raises(MissingRecordError, match="nothing called 'b'"):
        values({"a": torch.ones(1)}, "b")
    with pytest.raises(ValueError, match=r"which one\? There are 4 values"):
        one(recording)
    with pytest.raises(ValueError, match="empty"):
        values(Recording())
    with pytest.raises(TypeError, match="this is one value"):
        values(torch.ones(1), "a")


def test_limits_leave_out_outliers_and_are_never_empty() -> None:
    array = np.concatenate([np.linspace(0, 1, 999), [1e9]])
    assert limits(array)[1] < 1.01
    assert limits(np.full(5, 2.0)) == (1.5, 2.5)
    assert limits(np.full(5, np.nan)) == (0.0, 1.0)
    assert limits(np.array([np.inf, 0.0, 1.0]), clip=0) == (0.0, 1.0)
    assert limits(np.array([-1.0, 3.0]), clip=0, center=True) == (-3.0, 3.0)
    mostly_zero = np.zeros(1000)
    mostly_zero[0] = 4.0
    assert limits(mostly_zero) == (0.0, 4.0)


def test_flaws_are_named() -> None:
    assert flaws(np.array([1.0, 2.0])) == ""
    assert flaws(np.array([1.0, 1.0])) == "constant 1"
    assert flaws(np.array([np.nan, 1.0, 2.0, 3.0])) == "25% NaN"
    assert flaws(np.array([np.inf, 1.0, 2.0, 3.0])) == "25% Inf"
    assert flaws(np.append(np.arange(999.0), np.nan)) == "1 NaN"


@pytest.mark.parametrize("shape", [(64, 32, 64), (96, 32, 32), (3, 8, 64), (12, 12, 12)])
def test_what_a_convolution_may_give_is_channels_first(shape: tuple[int, ...]) -> None:
    x = numbered(1, *shape)
    found = maps(recorded(x))
    np.testing.assert_array_equal(found.array, x[0].numpy())
    assert found.assumed == ""


def test_channels_last_is_said_where_it_is_assumed_only() -> None:
    x = numbered(1, 7, 7, 96)
    assert maps(recorded(x)).assumed == "channels last"
    assert maps(recorded(x), layout="channels_last").assumed == ""
    np.testing.assert_array_equal(maps(recorded(x), layout="channels_first").array, x[0].numpy())
    video = numbered(1, 4, 7, 7, 96)
    np.testing.assert_array_equal(maps(recorded(video)).array, video[0, 2].permute(2, 0, 1).numpy())


def test_limits_have_room_around_a_large_constant() -> None:
    assert limits(np.full(3, 1e20, np.float32)) == pytest.approx((0.999e20, 1.001e20))
    low, high = limits(np.array([-3e38, 3e38], np.float32), clip=0)
    assert (low, high) == pytest.approx((-3e38, 3e38))


def test_whole_numbers_are_those_of_numpy_and_torch_too() -> None:
    assert [number(n) for n in (2, np.int64(2), torch.tensor(2), 2.0, "2", [2])] == [2, 2, 2, None, None, None]
    assert chosen([np.int64(0), -1], 3, "heads") == [0, 2]
    with pytest.raises(IndexError, match=r"heads \[0.5\] are out of range"):
        chosen([0.5], 3, "heads")


def test_a_signal_that_is_said_to_have_its_channels_first_is_no_image() -> None:
    x = numbered(1, 49, 20)
    found = maps(recorded(x), layout="channels_first")
    np.testing.assert_array_equal(found.array, x.numpy())
    assert (found.flat, found.note) == (True, "channels × places")
