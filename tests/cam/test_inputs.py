"""What a map is made of and on: an input that does not fit is told in one sentence, and what fits is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook.errors import TargetError
from torchhook.types import CAM


class Pooled(nn.Module):
    """Takes an image with or without a batch, as layers of torch do: the mistake shows later, or never."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(channels, 4, 3), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((-1, -2)))  # type: ignore[no-any-return]


class Sized(Pooled):
    """Asks for the batch before anything else runs, as vision transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        _, _, _, _ = x.shape
        return super().forward(x)


class Spectrogram(nn.Module):
    """Takes batch × bands × time, and sees it as images of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pooled(2, channels=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None])  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_an_image_in_bytes_is_told_to_be_numbers() -> None:
    for image in (torch.zeros(1, 3, 16, 16), torch.zeros(3, 16, 16)):
        with pytest.raises(TypeError, match=r"image is uint8.*floating-point.*x\.float\(\) / 255") as caught:
            th.cam(Pooled(2), image.byte(), 1)
        assert "batch" not in str(caught.value)
    with pytest.raises(TypeError, match=r"image is int64.*x\.float\(\), "):
        th.cam(Pooled(2), {"x": torch.zeros(1, 3, 16, 16, dtype=torch.int64)}, 1)


@pytest.mark.parametrize("model", [Pooled(2), Pooled(3), Sized(2), normed()], ids=["2", "3", "sized", "normed"])
@pytest.mark.parametrize("options", [{}, {"layer": nn.Conv2d}, {"method": "eigencam"}], ids=str)
def test_an_image_without_a_batch_is_told_so(model: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\(3, 16, 16\) has no batch .*: give x\[None\]\.$"):
        th.cam(model, torch.rand(3, 16, 16), 1, **options)
    assert th.cam(model, torch.rand(1, 3, 16, 16), 1, **options).map.shape == (1, 16, 16)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [((16, 16, 3), r"x\.permute\(2, 0, 1\)\[None\]"), ((2, 16, 16, 3), r"x\.permute\(0, 3, 1, 2\)")],
)
def test_an_image_with_its_channels_last_is_told_so(shape: tuple[int, ...], advice: str) -> None:
    with pytest.raises(ValueError, match=rf"channels last.*: give {advice}\.$"):
        th.cam(Pooled(2), torch.rand(shape), 1)


def test_what_a_model_makes_an_image_of_itself_is_left_alone() -> None:
    for count in (1, 2):
        found: CAM = th.cam(Spectrogram(), torch.rand(count, 16, 20), 1, layer="inner.conv", layout=lambda maps: maps)
        assert found.raw.shape == (count, 14, 18)
    with pytest.raises(TargetError, match="9"):
        th.cam(Spectrogram(), torch.rand(1, 16, 20), 9, layer="inner.conv")


def test_an_error_of_the_models_own_passes_unchanged() -> None:
    class Raises(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        th.cam(Raises(2), torch.rand(1, 3, 16, 16), 1)
    with pytest.raises(RuntimeError, match="expected input"):
        th.cam(Pooled(2), torch.rand(1, 5, 16, 16), 1)
