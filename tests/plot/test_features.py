"""Feature maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook.plot import feature_maps

matplotlib = pytest.importorskip("matplotlib")


def pictures(figure: Any) -> list[Any]:
    return [ax.images[0] for ax in figure.axes if ax.images]


def test_the_mean_map_is_the_second_seeds_picture() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
    x = torch.randn(1, 3, 20, 24)
    feat_out = nn.functional.conv2d(x, model[0].weight, model[0].bias)
    fmap = feat_out.mean(dim=1).squeeze().detach().numpy()
    fmap = (fmap - fmap.min()) / (fmap.max() - fmap.min())
    expected = matplotlib.colormaps["viridis"](fmap)

    with th.capture(model, "0") as recording:
        model(x)
    (picture,) = pictures(feature_maps(recording, "0", reduce="mean"))
    found = picture.cmap(picture.norm(picture.get_array()))
    # Both go through float32 arithmetic of their own: a value on the edge of a color may fall to either side.
    assert np.abs(found - expected).max() < 0.02


def test_every_channel_has_a_picture_up_to_a_limit_spread_evenly() -> None:
    x = torch.arange(40.0)[None, :, None, None].expand(1, 40, 4, 4) + torch.rand(4, 4)
    assert len(pictures(feature_maps(x, channels=40))) == 40
    figure = feature_maps(x, channels=5)
    assert [ax.get_title() for ax in figure.axes] == ["0", "10", "20", "29", "39"]
    assert [ax.get_title() for ax in feature_maps(x, channels=[3, -1]).axes] == ["3", "39"]


def test_a_recording_of_several_layers_has_one_map_of_each() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    with th.capture(model, "*") as recording:
        model(torch.randn(2, 3, 8, 8))
    figure = feature_maps(recording)
    assert [ax.get_title() for ax in figure.axes] == ["0", "1", "2 · vector", "3 · vector"]
    np.testing.assert_allclose(pictures(figure)[0].get_array(), recording["0"][0].norm(dim=0).numpy(), atol=1e-6)


def test_maps_of_a_whole_layer_and_of_a_channel_are_both_sharp() -> None:
    x = torch.randn(1, 8, 7, 7)
    for reduce in (None, "mean", "max", "norm"):
        assert {p.get_interpolation() for p in pictures(feature_maps(x, reduce=reduce))} == {"nearest"}


@pytest.mark.parametrize(
    ("count", "columns"),
    [(3, 3), (5, 3), (6, 3), (8, 4), (9, 3), (10, 5), (16, 4), (24, 6), (32, 8), (64, 8), (100, 10)],
)
def test_channels_stand_in_full_rows(count: int, columns: int) -> None:
    figure = feature_maps(torch.randn(1, 128, 4, 4), channels=count)
    assert figure.axes[0].get_gridspec().ncols == columns


def test_a_vector_is_called_one() -> None:
    alone = feature_maps({"fc": torch.randn(2, 1000)})
    assert alone.get_suptitle() == "fc · vector of 1,000 values, no map"
    several = feature_maps({"conv": torch.randn(2, 3, 4, 4), "fc": torch.randn(2, 1000)})
    assert [ax.get_title() for ax in several.axes] == ["conv", "fc · vector"]


def test_a_place_where_channels_of_both_signs_are_strong_is_seen_in_the_norm_of_a_layer() -> None:
    """In the mean they cancel: what is left of a deep layer before its activation looks like noise."""
    x = torch.randn(1, 64, 7, 7, generator=torch.Generator().manual_seed(0))
    x[0, ::2, 2, 3] += 8
    x[0, 1::2, 2, 3] -= 8
    (shown,) = pictures(feature_maps({"deep": x, "other": x}, ["deep"], reduce="norm"))
    assert np.unravel_index(shown.get_array().argmax(), (7, 7)) == (2, 3)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(()),
        torch.randn(9),
        torch.randn(5, 6),
        torch.randn(3, 8, 8),
        torch.randn(2, 12, 64),
        torch.randn(1, 197, 16),
        torch.randn(1, 8, 14, 14),
        torch.randn(1, 7, 7, 96),
        torch.randn(1, 4, 3, 8, 8),
        torch.full((1, 4, 8, 8), 3.0),
        torch.full((1, 4, 8, 8), float("nan")),
        torch.full((1, 4, 8, 8), float("inf")),
        torch.randn(1, 4, 8, 8).half(),
        torch.randn(1, 4, 1, 300),
        torch.ones(1, 1, 1, 1),
    ],
    ids=lambda t: "×".join(map(str, t.shape)) or "scalar",
)
def test_every_shape_and_value_can_be_drawn(value: Tensor) -> None:
    for reduce in (None, "mean", "max", "norm"):
        figure = feature_maps(value, reduce=reduce)
        figure.canvas.draw()
        assert pictures(figure)


def test_an_outlier_does_not_wash_out_the_rest() -> None:
    x = torch.rand(1, 1, 20, 20)
    x[0, 0, 3, 3] = 1e6
    (picture,) = pictures(feature_maps(x))
    assert picture.norm.vmax < 1.01


def test_nan_has_a_color_of_its_own_and_is_said() -> None:
    x = torch.rand(1, 2, 4, 4)
    x[0, 0, 0, 0] = torch.nan
    figure = feature_maps(x)
    assert "6% NaN" in figure.axes[0].get_title()
    picture = pictures(figure)[0]
    bad = picture.cmap(np.ma.masked_invalid([np.nan]))[0]
    assert bad.tolist() not in [
        picture.cmap(v).tolist() if hasattr(picture.cmap(v), "tolist") else list(picture.cmap(v))
        for v in (0.0, 0.5, 1.0)
    ]


def test_wrong_options_are_refused() -> None:
    x = torch.rand(1, 2, 4, 4)
    with pytest.raises(ValueError, match="reduce='sum'"):
        feature_maps(x, reduce="sum")
    with pytest.raises(ValueError, match="channels=0"):
        feature_maps(x, channels=0)
    with pytest.raises(IndexError, match=r"channels \[7\]"):
        feature_maps(x, channels=[7])


def test_a_wide_convolution_is_read_as_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1))
    with th.capture(model, "0") as recording:
        model(torch.randn(1, 3, 128, 256))
    (mean,) = pictures(feature_maps(recording, "0", reduce="mean"))
    np.testing.assert_allclose(mean.get_array(), recording["0"][0].mean(0).numpy(), atol=1e-6)
    figure = feature_maps(recording, "0", channels=np.int64(4))
    assert figure.get_suptitle() == "0 · 4 of 64 channels"
    np.testing.assert_array_equal(pictures(figure)[0].get_array(), recording["0"][0, 0].numpy())


class Turned(nn.Module):
    """Convolutions on a wide image, or on a square one with their channels turned last, as in Swin."""

    def __init__(self, channels: int, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Conv2d(3, channels, 2, 2), nn.BatchNorm2d(channels))
        self.norm = nn.LayerNorm(channels) if last else nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return self.act(self.norm(y.permute(0, 2, 3, 1) if isinstance(self.norm, nn.LayerNorm) else y))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_recording_knows_where_the_channels_are(saved: bool, again: bool, tmp_path: Any) -> None:
    # 16 channels of 16 × 32, which look like 16 × 16 with 32 of them: the block's layers say it, and for the ReLU the
    # grid of the convolution.
    model = Turned(16, last=False).eval()
    session = th.capture(model, "block", "block.0", "act")
    for _ in range(1 + again):
        with session as recording:
            model(torch.randn(1, 3, 32, 64))
    recording = th.load(recording.save(tmp_path / "run.safetensors")) if saved else recording
    for site in ("block", "block.0", "act"):
        figure = feature_maps(recording, site, reduce="mean")
        np.testing.assert_allclose(
            pictures(figure)[0].get_array(), recording[site][0].mean(0).detach().numpy(), atol=1e-6
        )


@pytest.mark.parametrize("channels", [12, 16, 48])
def test_a_recording_of_channels_last_is_turned(channels: int) -> None:
    # 16 × 16 with 16 channels is a cube: the norm says that its channels are the last.
    model = Turned(channels, last=True).eval()
    with th.capture(model, "norm") as recording:
        model(torch.randn(1, 3, 32, 32))
    figure = feature_maps(recording, "norm", reduce="mean")
    np.testing.assert_allclose(
        pictures(figure)[0].get_array(), recording["norm"][0].mean(-1).detach().numpy(), atol=1e-6
    )


def test_the_title_says_that_channels_last_was_assumed() -> None:
    swin = torch.randn(1, 7, 7, 96)
    assert feature_maps({"a": swin}).get_suptitle() == "a · 24 of 96 channels · channels last"
    assert "channels last" not in feature_maps({"a": swin}, layout="channels_last").get_suptitle()
    titles = [ax.get_title() for ax in feature_maps({"a": swin, "b": torch.randn(1, 3, 8, 8)}).axes]
    assert titles == ["a · channels last", "b"]
