"""Where the channels are: by the layer, the input and the other layers, and only then by the shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchhook._report.collect import collect
from torchhook._report.facts import Call, Page


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


class Patches(nn.Module):
    """A class token and the patches of an image that is not square."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 8, 16, 16)
        self.mark = nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = self.mark(torch.cat([tokens.new_zeros(len(x), 1, 8), tokens], 1))
        return self.head(tokens.mean(1))


@pytest.mark.parametrize(("size", "grid"), [((96, 64), (6, 4)), ((64, 64), (4, 4))])
def test_tokens_are_laid_out_on_the_grid_of_the_image(size: tuple[int, int], grid: tuple[int, int]) -> None:
    # 6 × 4 patches and a class token are 25, which is a square and not one.
    page = collect(Patches().eval(), torch.randn(1, 3, *size), cam=None, repeats=1)
    maps = call(page, "mark").maps
    assert maps is not None
    assert (maps.height, maps.width) == grid
    assert "all 8 channels" in maps.what


def test_a_pool_says_where_the_channels_are() -> None:
    # 8 × 8 × 64 looks like channels last, and is what a pooling layer gave of 8 channels.
    model = nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (16, 128)), nn.MaxPool2d(2)).eval()
    value = call(collect(model, torch.rand(1, 8, 32, 64), cam=None, repeats=1), "2").value
    assert value is not None
    assert value.channels == 8
