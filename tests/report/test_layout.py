"""Where the channels are: by the layer, the input and the other layers, and only then by the shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchhook._report.collect import collect
from torchhook._report.facts import Call, Page
from torchhook._report.layout import channels_first, maps_of


def call(page: Page, path: str) -> Call:
    return next(layer.calls[0] for layer in page.layers if layer.path == path)


def wide() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    with torch.no_grad():
        model[0].weight[:10], model[0].bias[:10] = 0, -1
    return model.eval()


@pytest.mark.parametrize("size", [(128, 256), (128, 128), (128, 1024)])
def test_channels_of_a_convolution_are_found_on_any_image(size: tuple[int, int]) -> None:
    model, x = wide(), torch.randn(1, 3, *size)
    page = collect(model, x, cam=None, repeats=1)
    seen = call(page, "1")
    assert seen.shape == str((1, 64, size[0] // 2, size[1] // 2))
    assert seen.value is not None
    # Ten biases of -1 with weights of zero are ten zeros behind the ReLU.
    assert (seen.value.dead, seen.value.channels) == (10, 64)
    assert seen.maps is not None
    assert "of 64 channels" in seen.maps.what
    assert seen.maps.width / seen.maps.height == pytest.approx(size[1] / size[0], rel=0.1)
    assert [finding.kind for finding in page.findings if finding.kind == "dead"] == ["dead"]


class Last(nn.Module):
    """Channels last between a patch embedding and the head, as in Swin; the first stage has few channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 24, 4, 4)
        self.norm = nn.LayerNorm(24)
        self.act = nn.ReLU()
        self.head = nn.Linear(24, 4)
        with torch.no_grad():
            self.norm.bias[:5] = -100

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.embed(x).permute(0, 2, 3, 1)))
        return self.head(x.mean((1, 2)))


def test_channels_last_is_known_by_the_grid_of_the_patches() -> None:
    page = collect(Last().eval(), torch.randn(2, 3, 64, 64), cam=None, repeats=1)
    for path in ("embed", "norm", "act"):
        value = call(page, path).value
        assert value is not None
        assert (value.dead, value.channels) == (5 if path == "act" else 0, 24)


def test_a_signal_has_its_channels_first() -> None:
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6)).eval()
    page = collect(model, torch.randn(1, 2, 40), repeats=1)
    value = call(page, "1").value
    assert value is not None
    assert value.channels == 6


def test_what_is_known_counts_more_than_the_shape() -> None:
    value = torch.rand(1, 7, 7, 96)
    assert maps_of(value, last=False).shape == (7, 7, 96)  # type: ignore[union-attr]
    assert channels_first(value, last=False).shape == (7, 7 * 96)  # type: ignore[union-attr]
    assert maps_of(torch.rand(1, 4, 7, 7, 96)).shape == (96, 7, 7)  # type: ignore[union-attr]
    assert maps_of(torch.rand(1, 64, 64, 128)).shape == (64, 64, 128)  # type: ignore[union-attr]
