"""Pictures, decoded by pillow again."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch

from torchhook._report import pictures
from torchhook._values.layout import guess

pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")


def decoded(uri: str) -> Any:
    return pillow.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_the_lowest_value_is_dark_and_the_highest_light() -> None:
    ramp = torch.arange(16.0).reshape(1, 4, 4)
    image = decoded(pictures.sprite(ramp, ["ramp"], "", 56).uri).convert("RGB")
    assert image.size == (4, 4)
    assert image.getpixel((0, 0)) == (0x44, 0x01, 0x54)
    assert image.getpixel((3, 3)) == (0xFD, 0xE7, 0x25)


def test_what_is_not_finite_has_a_color_of_its_own() -> None:
    maps = torch.rand(1, 3, 3)
    maps[0, 1, 1] = float("nan")
    image = decoded(pictures.sprite(maps, ["a"], "", 56).uri).convert("RGB")
    assert image.getpixel((1, 1)) == (255, 0, 128)
    assert image.getpixel((0, 0)) != (255, 0, 128)


def test_maps_stand_beside_each_other_in_the_order_of_their_labels() -> None:
    maps = torch.zeros(10, 2, 2)
    maps[9, 0, 0] = 1.0
    made = pictures.sprite(maps, [str(i) for i in range(10)], "", 56)
    image = decoded(made.uri).convert("RGB")
    assert image.size == (made.columns * 2, 4)
    at = (9 % made.columns) * 2, (9 // made.columns) * 2
    assert image.getpixel(at) == (0xFD, 0xE7, 0x25)


def test_the_channels_that_vary_most_are_shown_first() -> None:
    value = torch.zeros(1, 4, 8, 8)
    value[0, 2] = torch.randn(8, 8) * 5
    value[0, 1] = torch.randn(8, 8)
    made = pictures.feature_maps(value, guess(value.shape), 2, 56)
    assert made is not None
    assert made.labels == ["norm", "channel 2", "channel 1"]


def test_large_maps_are_made_smaller_and_keep_their_shape() -> None:
    made = pictures.feature_maps(torch.rand(1, 3, 200, 100), guess((1, 3, 200, 100)), 3, 56)
    assert made is not None
    assert (made.width, made.height) == (28, 56)


@pytest.mark.parametrize(
    "shape", [(1, 7), (2, 5, 9), (3, 8, 1, 1), (1, 4, 6, 6), (1, 2, 3, 6, 6), (12,), (1, 8, 8, 32)]
)
def test_every_shape_has_a_picture(shape: tuple[int, ...]) -> None:
    made = pictures.feature_maps(torch.rand(shape), guess(shape) if len(shape) > 2 else None, 4, 28)
    if shape == (3, 8, 1, 1):
        assert made is None
        return
    assert made is not None
    rows = -(-len(made.labels) // made.columns)
    assert decoded(made.uri).size == (made.columns * made.width, rows * made.height)


def test_heads_come_with_their_mean() -> None:
    made = pictures.heads(torch.rand(2, 3, 5, 5), 64)
    assert made.labels == ["mean", "head 0", "head 1", "head 2"]


def test_heat_is_clear_where_the_map_is_low() -> None:
    map_ = torch.zeros(4, 4)
    map_[2:, 2:] = 1.0
    image = decoded(pictures.heat(map_, 32, 32)).convert("RGBA")
    assert image.size == (32, 32)
    assert image.getpixel((2, 2))[3] < 10
    assert image.getpixel((28, 28))[3] > 245


def test_the_mean_is_not_finite_where_no_channel_is() -> None:
    value = torch.rand(1, 4, 3, 3)
    value[:, :, 0, 0] = float("nan")
    value[0, 1, 2, 2] = float("inf")
    image = decoded(pictures.feature_maps(value, guess(value.shape), 4, 56).uri).convert("RGB")  # type: ignore[union-attr]
    assert image.getpixel((0, 0)) == (255, 0, 128)
    assert image.getpixel((2, 2)) != (255, 0, 128)
    nothing = pictures.feature_maps(torch.full((1, 4, 3, 3), float("nan")), guess(value.shape), 4, 56)
    assert decoded(nothing.uri).convert("RGB").getpixel((1, 1)) == (255, 0, 128)  # type: ignore[union-attr]


def test_the_first_tile_shows_where_channels_are_strong_whatever_their_sign() -> None:
    """Before an activation, signs cancel in a mean."""
    value = torch.randn(1, 32, 7, 7, generator=torch.Generator().manual_seed(0))
    value[0, ::2, 2, 3] += 8
    value[0, 1::2, 2, 3] -= 8
    made = pictures.feature_maps(value, guess(value.shape), 2, 56)
    assert made is not None
    tile = decoded(made.uri).convert("RGB").crop((0, 0, 7, 7))
    brightest = max(((x, y) for x in range(7) for y in range(7)), key=lambda at: sum(tile.getpixel(at)))
    assert brightest == (3, 2)
