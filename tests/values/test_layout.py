"""Where channels, grid and prefix tokens are, against shapes that are plain to see and what layers give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchhook._values.layout import (
    Grids,
    Layout,
    channel_dim,
    guess,
    infer,
    known_kind,
    looks_channels_last,
    looks_like_batch,
    over_image,
    own_kind,
    spatial_dims,
    square_grid,
    told,
)
from torchhook.errors import LayoutError

# -- by the input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((1, 64, 7, 7), (224, 224), "channels first 7×7"),
        ((1, 7, 7, 768), (224, 224), "channels last 7×7"),
        ((1, 7, 7, 7), (224, 224), "channels first 7×7"),
        ((1, 8, 4, 96), (256, 128), "channels last 8×4"),
        ((1, 96, 8, 4), (256, 128), "channels first 8×4"),
        ((1, 197, 192), (224, 224), "tokens 14×14 after 1 prefix token"),
        ((1, 198, 192), (224, 224), "tokens 14×14 after 2 prefix tokens"),
        ((1, 49, 768), (224, 224), "tokens 7×7"),
        ((1, 99, 64), (224, 112), "tokens 14×7 after 1 prefix token"),
        ((1, 512, 2, 4, 4), (16, 32, 32), "channels first 2×4×4"),
        ((1, 2, 4, 4, 512), (16, 32, 32), "channels last 2×4×4"),
        ((197, 1, 64), (224, 224), "tokens 14×14 after 1 prefix token"),
    ],
)
def test_layouts_are_read_off_the_shapes(shape: tuple[int, ...], size: tuple[int, ...], expected: str) -> None:
    assert str(infer(shape, size, 1)) == expected


def test_a_grid_that_another_layer_gave_is_believed() -> None:
    assert infer((1, 25, 8), (60, 100), 1, seen=[(3, 8)]).grid == (3, 8)


@pytest.mark.parametrize(("kind", "shape"), [("channels_first", (1, 8, 4, 64)), ("channels_last", (1, 4, 64, 8))])
def test_strides_may_differ_where_the_layout_is_said(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="say how it is laid out"):
        infer(shape, (32, 64), 1)
    assert infer(shape, (32, 64), 1, kind=kind).grid == (4, 64)


def test_time_may_be_thinned_out_less_than_space() -> None:
    assert str(infer((1, 64, 16, 7, 7), (16, 224, 224), 1)) == "channels first 16×7×7"
    assert str(infer((1, 8, 7, 7, 768), (16, 224, 224), 1)) == "channels last 8×7×7"
    assert str(infer((1, 393, 96), (16, 224, 224), 1, [(8, 56, 56)])) == "tokens 8×7×7 after 1 prefix token"


def test_only_grids_of_seven_by_seven_and_more_are_taken_for_images() -> None:
    assert [square_grid(n) for n in (49, 50, 197, 201, 16, 9, 60)] == [
        (7, 7),
        (7, 7),
        (14, 14),
        (14, 14),
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("side", [7, 28, 32, 56, 64])
@pytest.mark.parametrize("channels", [3, 16, 48, 96, 192, 768])
def test_the_two_sides_that_are_equal_are_those_of_the_map(side: int, channels: int) -> None:
    assert looks_channels_last((side, side, channels))
    assert not looks_channels_last((channels, side, side))
    value = torch.rand(2, side, side, channels)
    assert torch.equal(guess(value.shape).picture(value, 1), value[1].permute(2, 0, 1))
    first = value.permute(0, 3, 1, 2)
    assert torch.equal(guess(first.shape).picture(first, 1), first[1])


def test_what_is_no_square_or_one_either_way_has_its_channels_first() -> None:
    for shape in ((12, 12, 12), (3, 8, 64), (64, 32, 64), (5, 5)):
        assert not looks_channels_last(shape)


def test_a_volume_has_its_channels_last_where_they_are_the_most() -> None:
    # A video of Swin's; a scan of 64 × 64 × 24 with 32 channels has two equal sides in the same place.
    assert looks_channels_last((8, 7, 7, 768))
    assert looks_channels_last((8, 56, 56, 96))
    for shape in ((32, 64, 64, 24), (64, 16, 7, 7), (64, 8, 8, 8)):
        assert not looks_channels_last(shape)


def test_a_layer_says_where_its_channels_are_and_so_do_those_in_it() -> None:
    def block(*modules: nn.Module) -> nn.Module:
        return nn.Sequential(*modules)

    assert own_kind(nn.Conv2d(3, 8, 3)) == ("channels_first", True)
    assert own_kind(nn.Linear(3, 8)) == ("channels_last", True)
    assert own_kind(block(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())) == ("channels_first", False)
    assert own_kind(block(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())) == ("channels_last", False)
    assert own_kind(block(nn.Conv2d(3, 8, 3), nn.LayerNorm(8))) is None
    assert own_kind(nn.ReLU()) is None


def test_where_layers_of_a_known_kind_and_the_grids_of_others_tell_the_shape_does_not_count() -> None:
    assert told((64, 64, 128), [(64, 128)], None) == "channels_first"
    assert told((64, 64, 128), [(64, 64)], ("channels_first", False)) == "channels_last"
    assert told((64, 64, 128), [(64, 128), (64, 64)], None) is None
    assert told((64, 64, 128), [], ("channels_first", False)) == "channels_first"
    assert told((16, 16, 100), [], ("channels_first", True)) == "channels_first"
    # What convolutions made may have been turned afterwards: far more channels than places say so.
    assert told((64, 64, 768), [], ("channels_first", False)) is None


# -- by the shape alone -----------------------------------------------------------------------------


def test_what_is_known_counts_more_than_the_shape() -> None:
    value = torch.rand(1, 7, 7, 96)
    assert torch.equal(guess(value.shape, "channels_first").picture(value), value[0])
    assert guess(value.shape, "channels_first").channels == 1
    assert guess((1, 4, 7, 7, 96)).grid == (4, 7, 7)
    assert str(guess((1, 64, 64, 128), "channels_first")) == "channels first 64×128"
    assert str(guess((1, 49, 100), "channels_first")) == "channels first 100"
    assert str(guess((1, 49, 100), "channels_last")) == "channels last 49"


def test_patches_of_an_image_become_a_grid_without_the_class_token() -> None:
    tokens = torch.zeros(1, 10, 4)
    tokens[0, 1:, 0] = torch.arange(9.0)
    maps = guess(tokens.shape, image=True).picture(tokens)
    assert torch.equal(maps[0], torch.arange(9.0).reshape(3, 3))
    assert guess(tokens.shape).grid == (10,)


def test_channels_last_is_recognized() -> None:
    value = torch.rand(2, 7, 7, 96)
    maps = guess(value.shape).picture(value, 1)
    assert torch.equal(maps[5], value[1, :, :, 5])


def test_of_a_volume_the_middle_slice_is_the_picture() -> None:
    value = torch.rand(1, 4, 5, 6, 7)
    assert torch.equal(guess(value.shape).picture(value), value[0, :, 2])
    video = torch.rand(1, 5, 7, 7, 96)
    assert torch.equal(guess(video.shape).picture(video), video[0, 2].permute(2, 0, 1))


def test_a_grid_that_is_said_leaves_the_rest_as_prefix() -> None:
    assert guess((1, 13, 2), grid=(3, 4)) == Layout("tokens", (3, 4), prefix=1)
    with pytest.raises(LayoutError, match=r"grid=\(4, 5\): it needs 20 tokens, and there are 13"):
        guess((1, 13, 2), grid=(4, 5))


def test_a_square_may_be_asked_for_more_loosely() -> None:
    assert square_grid(13) is None
    assert square_grid(13, 3, range(6)) == (3, 3)
    assert square_grid(16, 1, (0,)) == (4, 4)


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [
        (196, (224, 224), ((14, 14), 0)),
        (197, (224, 224), ((14, 14), 1)),
        (198, (224, 224), ((14, 14), 2)),
        (201, (224, 224), ((14, 14), 5)),
        (205, (224, 224), ((14, 14), 9)),
        (21, (64, 64), ((4, 4), 5)),
        (193, (384, 512), ((12, 16), 1)),
        (197, (384, 384), ((14, 14), 1)),  # an image of another size than the model saw
        (197, (480, 640), ((14, 14), 1)),
        (7, (64, 64), None),  # 2 × 2 after 3: more likely words
        (25, (64, 64), ((5, 5), 0)),
        (1370, (518, 518), ((37, 37), 1)),
    ],
)
def test_tokens_are_laid_over_an_image_after_as_few_others_as_can_be(
    tokens: int, size: tuple[int, int], expected: tuple[tuple[int, int], int] | None
) -> None:
    assert over_image(tokens, size) == (None if expected is None else Layout("tokens", *expected))


@pytest.mark.parametrize(
    ("shape", "kind", "batch"),
    [
        ((5, 6), None, False),
        ((3, 8, 8), None, False),
        ((1, 8, 8), None, True),
        ((2, 197, 64), None, True),
        ((2, 197, 64), "channels_first", False),
        ((2, 12, 64), "tokens", True),
        ((2, 3, 8, 8), None, True),
    ],
)
def test_dim_0_of_a_bare_tensor_is_the_batch_where_nothing_else_fits(
    shape: tuple[int, ...], kind: str | None, batch: bool
) -> None:
    assert looks_like_batch(shape, kind) is batch


def test_a_layout_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert known_kind(None) is None
    assert known_kind("tokens") == "tokens"
    with pytest.raises(LayoutError, match=r"layout='rows': use .*'tokens' or a function"):
        known_kind("rows", " or a function")


# -- by the layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(2, 9, 3), torch.rand(1, 2, 8)),
        (nn.Conv2d(2, 9, 3), torch.rand(1, 2, 8, 7)),
        (nn.Conv2d(2, 9, 3), torch.rand(2, 8, 7)),
        (nn.Conv3d(2, 9, 3), torch.rand(1, 2, 8, 7, 6)),
        (nn.ConvTranspose2d(2, 9, 3), torch.rand(1, 2, 8, 6)),
        (nn.BatchNorm1d(9).eval(), torch.rand(4, 9)),
        (nn.BatchNorm1d(9).eval(), torch.rand(4, 9, 5)),
        (nn.GroupNorm(3, 9), torch.rand(4, 9, 5, 6)),
        (nn.InstanceNorm2d(9), torch.rand(4, 9, 5, 6)),
        (nn.MaxPool2d(2), torch.rand(4, 9, 6, 8)),
        (nn.AdaptiveAvgPool1d(2), torch.rand(4, 9, 6)),
        (nn.Linear(3, 9), torch.rand(4, 5, 3)),
        (nn.Linear(3, 9), torch.rand(4, 5, 6, 3)),
        (nn.LayerNorm(9), torch.rand(4, 5, 6, 9)),
        (nn.RMSNorm(9), torch.rand(4, 5, 9)),
        (nn.Embedding(7, 9), torch.zeros(4, 5, dtype=torch.long)),
    ],
)
def test_the_type_of_a_layer_says_where_its_nine_channels_are(layer: nn.Module, x: Tensor) -> None:
    output = layer(x)
    dim = channel_dim(layer, output.dim())
    assert [i for i, side in enumerate(output.shape) if side == 9] == [dim]


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm have it: channels first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.LayerNorm((3, 4)), LayerNorm2d(3), nn.Identity()])
def test_a_layer_that_gives_what_it_gets_does_not_say(layer: nn.Module) -> None:
    assert channel_dim(layer, 4) is None


def test_a_value_without_room_for_channels_has_none() -> None:
    assert channel_dim(nn.Conv2d(1, 1, 1), 2) is None
    assert channel_dim(nn.BatchNorm1d(3), 1) is None
    assert (spatial_dims(nn.MaxPool3d(2)), spatial_dims(nn.Linear(1, 1))) == (3, None)


def test_grids_of_convolutions_are_remembered_in_their_order() -> None:
    grids = Grids(2)
    for value in (torch.rand(1, 8, 6, 4), torch.rand(1, 8, 3, 2), torch.rand(1, 8, 6, 4), torch.rand(1, 8, 5), "text"):
        grids.see(value)
    assert list(grids.seen) == [(6, 4), (3, 2)]
    assert [grids.concern(module) for module in (nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.ReLU())] == [
        True,
        False,
        False,
    ]
