"""Attention maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchhook._attention import attention as attention_maps
from torchhook._attention import rollout
from torchhook.plot import attention

pytest.importorskip("matplotlib")


@pytest.fixture
def weights() -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(2, 4, 6, 6) * 2).softmax(-1)


def arrays(figure: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(ax.images[0].get_array()) for ax in figure.axes if ax.images]


def test_every_head_has_its_map(weights: torch.Tensor) -> None:
    figure = attention(weights, sample=1)
    for found, expected in zip(arrays(figure), weights[1], strict=True):
        np.testing.assert_array_equal(found, expected.numpy())
    assert [ax.get_title().split(" · ")[0] for ax in figure.axes[:-1]] == [f"head {i}" for i in range(4)]
    some = attention(weights, heads=[0, -1]).axes[:-1]
    assert [ax.get_title().split(" · ")[0] for ax in some] == ["head 0", "head 3"]


def test_recordings_and_rollouts_are_taken() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    maps = attention_maps(model.eval(), torch.randn(1, 5, 8))
    assert len(arrays(attention(maps, "layers.1.self_attn"))) == 2
    (rolled,) = arrays(attention(rollout(maps)))
    np.testing.assert_allclose(rolled, rollout(maps)[0].numpy())
    with pytest.raises(ValueError, match="which one"):
        attention(maps)


def test_words_are_shaded_by_how_much_they_are_looked_at(weights: torch.Tensor) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat"]
    figure = attention(weights, tokens=words, query=2, heads=1)
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.texts] == words
    darkness = [-sum(t.get_bbox_patch().get_facecolor()[:3]) for t in ax.texts]
    assert int(np.argmax(darkness)) == int(weights[0, 1, 2].argmax())
    assert [t.get_fontweight() == "bold" for t in ax.texts] == [w == "sat" for w in words]


def test_words_label_the_map(weights: torch.Tensor) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat"]
    ax, bar = attention(weights, tokens=words, heads=0).axes
    assert (ax.get_xlabel(), ax.get_ylabel(), bar.get_ylabel()) == ("key", "query", "weight")
    assert [t.get_text() for t in ax.get_xticklabels()] == words
    assert [t.get_text() for t in ax.get_yticklabels()] == words


@pytest.mark.parametrize(("heads", "shape"), [(12, (3, 4)), (16, (4, 4)), (2, (1, 2)), (5, (2, 3))])
@pytest.mark.parametrize("tokens", [None, list("abcdef")])
def test_many_heads_stand_in_a_square(heads: int, shape: tuple[int, int], tokens: list[str] | None) -> None:
    figure = attention(torch.rand(1, heads, 6, 6).softmax(-1), tokens=tokens)
    grid = figure.axes[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == shape
    assert max(figure.get_size_inches()) < 14
    # The axes have names, once for each row and column.
    *panels, _ = figure.axes  # and the color bar
    assert [ax.get_ylabel() for ax in panels] == ["query" if i % shape[1] == 0 else "" for i in range(heads)]
    assert sum(ax.get_xlabel() == "key" for ax in figure.axes) == shape[1]


def masked(*hidden: int, uniform: tuple[int, ...] = ()) -> torch.Tensor:
    """Maps of six tokens, some of which nobody looks at."""
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    scores[..., list(hidden)] = -torch.inf
    weights = scores.softmax(-1)
    weights[:, :, list(uniform)] = 1 / 6
    return weights


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        (masked(4, 5), slice(0, 4)),
        (masked(0, 1), slice(2, 6)),
        (masked(0, 1, uniform=(0, 1)), slice(2, 6)),
        (masked(2), slice(0, 6)),
        (torch.full((1, 2, 6, 6), 1 / 6), slice(0, 6)),
    ],
    ids=["after", "before", "before, spread evenly", "in the middle", "all even"],
)
def test_padding_is_cut(weights: torch.Tensor, kept: slice) -> None:
    words = list("abcdef")
    figure = attention(weights, tokens=words)
    for found, expected in zip(arrays(figure), weights[0], strict=True):
        np.testing.assert_array_equal(found, expected[kept, kept].numpy())
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == words[kept]
    said = "" if figure.get_suptitle() == "" else figure.get_suptitle().replace("\n", " ")
    assert said == ("" if kept == slice(0, 6) else "4 of 6 tokens, without padding")
    # Names of what is left will do as well, and padding can be kept.
    assert len(arrays(attention(weights, tokens=words[kept]))[0]) == len(words[kept])
    assert len(arrays(attention(weights, tokens=words, padding=True))[0]) == 6


def test_a_query_is_counted_with_the_padding_that_is_cut() -> None:
    figure = attention(masked(0, 1), tokens=list("abcdef"), query=3, heads=0)
    assert [t.get_text() for t in figure.axes[0].texts if t.get_fontweight() == "bold"] == ["d"]
    with pytest.raises(IndexError, match="query=0 is padding"):
        attention(masked(0, 1), tokens=list("abcdef"), query=0)


@pytest.mark.parametrize(("keys", "query", "expected"), [(50, None, 0), (50, 7, 7), (49, 3, 3)])
def test_what_a_query_looks_at_is_drawn_over_the_image(keys: int, query: int | None, expected: int) -> None:
    maps = torch.rand(1, 1, keys, keys)
    maps[0, 0, expected, keys - 49 + 24] = 50.0
    figure = attention(maps, image=torch.rand(1, 3, 70, 70), query=query)
    assert figure.axes[-1].get_ylabel() == "weight"  # the color bar
    heat = np.asarray(figure.axes[0].images[1].get_array())
    assert np.unravel_index(heat.argmax(), heat.shape) == pytest.approx((35, 35), abs=5)


@pytest.mark.parametrize(
    ("prefix", "grid", "size"),
    [
        (2, (4, 4), (64, 64)),  # distilled DeiT
        (5, (4, 4), (64, 64)),  # class token and four registers, as DINOv2 and DINOv3 have
        (4, (14, 14), (224, 224)),
        (9, (14, 14), (224, 224)),  # eight registers
        (1, (12, 16), (384, 512)),
        (1, (3, 4), (30, 40)),
        (1, (14, 14), (480, 640)),  # the photo that the model saw resized
        (0, (4, 4), (50, 70)),
    ],
)
def test_any_usual_number_of_prefix_tokens_is_told_from_patches(
    prefix: int, grid: tuple[int, int], size: tuple[int, int]
) -> None:
    keys = prefix + grid[0] * grid[1]
    maps = torch.rand(1, 1, keys, keys)
    row, column = grid[0] - 2, 1
    maps[0, 0, :, prefix + row * grid[1] + column] = 50.0
    figure = attention(maps, image=torch.rand(1, 3, *size))
    heat = np.asarray(figure.axes[0].images[1].get_array())
    high, wide = (full / side for full, side in zip(size, grid, strict=True))
    expected = ((row + 0.5) * high, (column + 0.5) * wide)
    assert np.unravel_index(heat.argmax(), heat.shape) == pytest.approx(expected, abs=max(high, wide))


def test_a_vision_transformer_with_registers_is_drawn_over_its_image() -> None:
    timm = pytest.importorskip("timm")
    image = torch.rand(1, 3, 64, 64)
    for name, more in (("vit_tiny_patch16_224", {"reg_tokens": 4}), ("deit_tiny_distilled_patch16_224", {})):
        model = timm.create_model(name, img_size=64, depth=1, num_classes=3, **more).eval()
        assert len(attention(attention_maps(model, image), image=image).axes) == 3 + 1  # heads, and a color bar


@pytest.mark.parametrize("keys", [7, 10, 27])
def test_a_text_over_an_image_is_told_to_be_named_by_its_words(keys: int) -> None:
    with pytest.raises(ValueError, match=rf"image: {keys} tokens .* 64×64.*tokens=\[.*grid=") as caught:
        attention(torch.rand(1, 1, keys, keys), image=torch.rand(1, 3, 64, 64))
    assert "patch" not in str(caught.value)


def test_a_grid_of_more_places_than_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grid=\(4, 5\): it needs 20 tokens, and there are 13"):
        attention(torch.rand(1, 1, 13, 13), image=torch.rand(3, 30, 40), grid=(4, 5))


def test_a_grid_that_is_not_square_is_asked_for() -> None:
    maps, image = torch.rand(1, 1, 13, 13), torch.rand(3, 31, 40)  # no whole number of pixels for each of 3 × 4
    with pytest.raises(ValueError, match=r"or grid=\(rows, columns\)"):
        attention(maps, image=image)
    assert attention(maps, image=image, grid=(3, 4)).axes


def test_wrong_options_are_refused(weights: torch.Tensor) -> None:
    with pytest.raises(IndexError, match=r"heads \[9\]"):
        attention(weights, heads=9)
    with pytest.raises(IndexError, match="query=6"):
        attention(weights, query=6)
    with pytest.raises(IndexError, match="sample=2"):
        attention(weights, sample=2)
    with pytest.raises(ValueError, match="1 token cannot name 6 keys"):
        attention(weights, tokens=["a"])
    with pytest.raises(ValueError, match="1 token cannot name 6 keys"):
        attention(weights, tokens=["a"], query=1)
    with pytest.raises(ValueError, match="found shape"):
        attention(torch.rand(5))


@pytest.mark.parametrize("heads", [np.int64(1), torch.tensor(1), -3, [np.int64(1)], np.array([1])])
def test_a_head_is_any_whole_number(weights: torch.Tensor, heads: Any) -> None:
    figure = attention(weights, heads=heads)
    np.testing.assert_array_equal(arrays(figure)[0], weights[0, 1].numpy())
    assert figure.axes[0].get_title() == "head 1"


def test_many_heads_have_one_color_bar_and_each_says_what_its_brightest_color_is() -> None:
    weights = torch.rand(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    weights[0, 1] /= 4
    *panels, bar = attention(weights).axes
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "top"]
    assert bar.get_ylabel() == "weight"
    for panel in panels:
        top = float(panel.get_title().partition(" · to ")[2])
        assert top == pytest.approx(panel.images[0].get_clim()[1], rel=0.01)


def covered(figure: Any) -> float:
    """How much of a figure its panels cover, color bars aside."""
    figure.canvas.draw()
    boxes = [ax.get_window_extent() for ax in figure.axes if ax.images and ax.get_label() != "<colorbar>"]
    return float(sum(box.width * box.height for box in boxes) / np.prod(figure.get_size_inches() * figure.dpi))


@pytest.mark.parametrize("heads", [1, 12, 32])
@pytest.mark.parametrize("shape", [(1, 3), (1, 90), (3, 60), (40, 3)])
@pytest.mark.parametrize("named", [False, True])
def test_maps_of_any_shape_fill_their_picture(heads: int, shape: tuple[int, int], named: bool) -> None:
    weights = torch.rand(1, heads, *shape, generator=torch.Generator().manual_seed(0)).softmax(-1)
    figure = attention(weights, tokens=[f"t{i}" for i in range(shape[1])] if named else None)
    assert covered(figure) > 0.4
    assert max(figure.get_size_inches()) < 14


def test_of_one_query_each_head_is_a_line_up_to_its_own_top() -> None:
    weights = torch.rand(1, 3, 1, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    weights[0, 1] /= 4
    panel, bar = attention(weights, tokens=list("abcdefg")).axes
    drawn = np.asarray(panel.images[0].get_array())
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert [label.get_text() for label in panel.get_xticklabels()] == list("abcdefg")
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "top"]
    for head, (name, line) in enumerate(zip(names, drawn, strict=True)):
        said, _, top = name.partition(" · to ")
        assert said == f"head {head}"
        np.testing.assert_allclose(line * float(top), weights[0, head, 0].numpy(), rtol=0.01)


def test_a_query_that_is_chosen_without_words_is_drawn_alone(weights: torch.Tensor) -> None:
    panel = attention(weights, query=-2, heads=1).axes[0]
    np.testing.assert_array_equal(np.asarray(panel.images[0].get_array()), weights[0, 1, -2:-1].numpy())
    assert (panel.get_title(), panel.get_ylabel(), panel.get_xlabel()) == ("head 1", "query", "key")


def test_one_query_is_drawn_into_an_axes_of_the_users() -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2)
    assert attention(torch.rand(1, 2, 1, 5).softmax(-1), ax=axes[1], title="step 3") is figure
    assert (len(figure.axes), axes[1].get_title(loc="left")) == (2, "step 3")
    plt.close(figure)
