"""Heat maps on images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torchhook.plot import overlay

pytest.importorskip("matplotlib")


@pytest.fixture
def photo() -> torch.Tensor:
    torch.manual_seed(0)
    photo = torch.rand(3, 20, 30)
    photo[:, 0, 0], photo[:, 0, 1] = 0.0, 1.0
    return photo


def test_the_map_is_resized_and_lets_the_image_through_where_it_is_low(photo: torch.Tensor) -> None:
    heat = torch.zeros(4, 6)
    heat[1, 2] = 1.0
    figure = overlay(photo, heat, alpha=0.5)
    base, above = figure.axes[0].images
    assert base.get_array().shape[:2] == above.get_array().shape == (20, 30)
    opacity = np.asarray(above.get_alpha())
    assert opacity.max() == pytest.approx(0.5, abs=0.05)
    assert opacity[-1, -1] == 0
    assert np.unravel_index(opacity.argmax(), opacity.shape) == pytest.approx((7, 12), abs=2)


@pytest.mark.parametrize("fill", [0.0, 1.0, float("nan")])
def test_a_constant_or_broken_map_leaves_the_image_as_it_is(photo: torch.Tensor, fill: float) -> None:
    figure = overlay(photo, torch.full((4, 6), fill))
    figure.canvas.draw()
    assert np.asarray(figure.axes[0].images[1].get_alpha()).max() == 0


def test_the_color_bar_ends_where_the_map_does(photo: torch.Tensor) -> None:
    heat = torch.rand(40, 60) * 0.5
    heat[3, 4], heat[9, 9] = 0.0, 1.0  # a single one, which a percentile leaves out
    bar = overlay(photo, heat).axes[-1]
    assert [label.get_text() for label in bar.get_yticklabels()][:: len(bar.get_yticks()) - 1] == ["0", "1"]


def test_a_map_with_a_title_still_tells_its_flaws(photo: torch.Tensor) -> None:
    assert overlay(photo, torch.zeros(4, 6), titles=["cat"]).axes[0].get_title() == "cat · constant 0"


def test_a_batch_has_a_panel_each_and_one_image_may_have_many_maps(photo: torch.Tensor) -> None:
    batch = torch.stack([photo, photo, photo])
    for image in (batch, photo):
        figure = overlay(image, torch.rand(3, 4, 6), titles=["a", "b", "c"])
        assert [ax.get_title() for ax in figure.axes if ax.images] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 maps cannot lie over 3 images"):
        overlay(batch, torch.rand(2, 4, 6))
    with pytest.raises(ValueError, match="1 title cannot"):
        overlay(photo, torch.rand(3, 4, 6), titles=["a"])


def test_of_a_volume_the_middle_slice_is_shown() -> None:
    assert overlay(torch.rand(1, 1, 5, 8, 8), torch.rand(1, 5, 8, 8)).axes


def test_wrong_shapes_are_refused(photo: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="image: expected"):
        overlay(torch.rand(7, 8, 9), torch.rand(4, 4))
    with pytest.raises(ValueError, match="heat: expected"):
        overlay(photo, torch.rand(4))
    with pytest.raises(ValueError, match="alpha=2"):
        overlay(photo, torch.rand(4, 4), alpha=2)


def test_images_come_from_files_and_pillow(photo: torch.Tensor, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image = pillow.fromarray((photo.permute(1, 2, 0) * 255).byte().numpy())
    image.save(tmp_path / "photo.png")
    for given in (image, tmp_path / "photo.png"):
        base = overlay(given, torch.rand(4, 6)).axes[0].images[0]
        np.testing.assert_allclose(base.get_array(), np.asarray(image) / 255)
