"""Images of every kind, against the one that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhook._values.images import IMAGENET_MEAN, IMAGENET_STD, pixels

MEAN, STD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]


@pytest.fixture
def photo() -> torch.Tensor:
    torch.manual_seed(0)
    photo = torch.rand(3, 20, 30)
    photo[:, 0, 0], photo[:, 0, 1] = 0.0, 1.0
    return photo


@pytest.mark.parametrize(
    "scaled",
    [
        lambda p: p,
        lambda p: p * 2 - 1,
        lambda p: (p - MEAN) / STD,
        lambda p: p * 255,
        lambda p: (p * 255).round().byte(),
        lambda p: p[None],
        lambda p: p.permute(1, 2, 0),
        lambda p: p.permute(1, 2, 0).numpy(),
        lambda p: torch.cat([p, torch.ones(1, 20, 30)]),
        lambda p: p.half(),
    ],
    ids=["unit", "signed", "imagenet", "0-255", "bytes", "batch", "last", "numpy", "alpha", "half"],
)
def test_an_image_is_itself_again_whatever_its_scale(photo: torch.Tensor, scaled: Any) -> None:
    (found,) = pixels(scaled(photo))
    np.testing.assert_allclose(found, photo.permute(1, 2, 0).numpy(), atol=0.005)


def test_gray_images_have_three_equal_channels() -> None:
    (found,) = pixels(torch.rand(5, 6))
    assert found.shape == (5, 6, 3)
    assert (found[..., 0] == found[..., 2]).all()


def test_an_odd_scale_is_stretched() -> None:
    (found,) = pixels(torch.randn(3, 8, 8) * 1e4)
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize("top", [2.0, 8.0, 50.0, 4095.0])
def test_a_positive_image_of_an_unusual_scale_is_stretched(top: float) -> None:
    ramp = torch.linspace(0, top, 64).reshape(1, 8, 8)
    (shown,) = pixels(ramp)
    np.testing.assert_allclose(shown[..., 0], np.linspace(0, 1, 64).reshape(8, 8), atol=0.01)


def test_dark_bytes_stay_dark() -> None:
    (shown,) = pixels(torch.full((3, 8, 8), 100.0))
    np.testing.assert_allclose(shown, 100 / 255)


@pytest.mark.parametrize(("top", "lightest"), [(1.0, 255), (8.0, 255), (2.0, 255), (200.0, 200), (3000.0, 255)])
def test_an_input_of_any_positive_scale_is_an_image(top: float, lightest: int) -> None:
    (shown,) = pixels(torch.linspace(0, top, 64).reshape(1, 8, 8))
    assert (shown * 255).round().max() == lightest
    assert shown.min() == 0


def test_files_and_images_of_pillow_are_taken_alone_and_in_lists(photo: torch.Tensor, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    data = (photo.permute(1, 2, 0) * 255).round().byte().numpy()
    image = pillow.fromarray(data)
    image.save(tmp_path / "photo.png")
    image.quantize(16).save(tmp_path / "palette.png")
    for given in (image, tmp_path / "photo.png", str(tmp_path / "photo.png")):
        (found,) = pixels(given)
        np.testing.assert_allclose(found, data / 255)
    assert [one.shape for one in pixels([tmp_path / "palette.png", image])] == [(20, 30, 3), (20, 30, 3)]
    (wide,) = pixels(pillow.fromarray(np.linspace(0, 4000, 64, dtype=np.float32).reshape(8, 8)))
    np.testing.assert_allclose(wide[..., 0], np.linspace(0, 1, 64).reshape(8, 8), atol=0.01)


def test_a_broken_pixel_does_not_change_the_others(photo: torch.Tensor) -> None:
    broken = (photo - MEAN) / STD
    broken[:, 5, 5], broken[:, 6, 6] = torch.nan, torch.inf
    (found,) = pixels(broken)
    assert (found[5, 5] == 0).all()
    assert (found[6, 6] == 0).all()
    found[5, 5], found[6, 6] = photo[:, 5, 5].numpy(), photo[:, 6, 6].numpy()
    np.testing.assert_allclose(found, photo.permute(1, 2, 0).numpy(), atol=0.005)
    assert not pixels(torch.full((3, 4, 4), torch.nan))[0].any()


def test_a_gray_image_that_was_normalized_stays_gray() -> None:
    ramp = torch.linspace(0, 1, 64).reshape(1, 8, 8)
    (found,) = pixels((ramp - 0.1307) / 0.3081)
    assert (found == found[..., :1]).all()
    np.testing.assert_allclose(found[..., 0], ramp[0], atol=0.01)


def test_an_image_that_was_resized_after_it_was_normalized_is_cut_off_and_not_stretched(photo: torch.Tensor) -> None:
    ringing = photo.clone()
    ringing[:, 3, 3] = 1.15
    (found,) = pixels((ringing - MEAN) / STD)
    photo[:, 3, 3] = 1.0
    np.testing.assert_allclose(found, photo.permute(1, 2, 0).numpy(), atol=1e-5)


def test_what_is_no_image_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"image: expected .* found shape \(7, 8, 9\)"):
        pixels(torch.rand(7, 8, 9))


def test_the_numbers_of_imagenet_are_those_that_everyone_uses() -> None:
    np.testing.assert_allclose(IMAGENET_MEAN, MEAN.flatten())
    np.testing.assert_allclose(IMAGENET_STD, STD.flatten())
