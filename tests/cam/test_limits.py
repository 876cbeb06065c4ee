"""Class activation maps where it gets tight: constants, frozen models, numpy's numbers, uneven strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.language_models import made
from tests.models import Merges
from torchhook._cam.api import cam
from torchhook._cam.result import stretch, upsample
from torchhook.errors import LayoutError


def photo() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


class Text(nn.Module):
    """The last layer's places do not count: the score is read off the first token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.last(self.first(self.embed(ids)))[:, 0])
        return scores


# -- one place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "scorecam", "ablationcam"])
def test_a_layer_of_one_place_is_refused_and_a_better_one_named(method: str) -> None:
    with pytest.raises(LayoutError, match=r"layer '2' gives maps on a grid of 1×1, one place.*layer='1'"):
        cam(photo(), torch.randn(2, 3, 12, 12), 1, "2", method, progress=False)
    # By a function too.
    whole = nn.Sequential(*list(photo())[:3], nn.Flatten(2), nn.Flatten(), nn.Linear(8, 5)).eval()
    with pytest.raises(LayoutError, match=r"layer '3' gives maps on a grid of 1×1.*layer='1'"):
        cam(whole, torch.randn(2, 3, 12, 12), 1, "3", method, layout=lambda v: v[..., None], progress=False)


def test_one_place_in_a_model_that_has_no_other_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 12), nn.Flatten(), nn.Linear(8, 5)).eval()
    with pytest.raises(LayoutError, match=r"layer '0' gives maps on a grid of 1×1.*no layer of this model gives a map"):
        cam(model, torch.randn(1, 3, 12, 12), 1, "0")


# -- constant maps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, 0.1, 3e-30, 7e30, -0.3])
def test_a_constant_that_was_resized_is_zero(value: float) -> None:
    maps = torch.full((1, 7, 7), value)
    assert torch.equal(stretch(upsample(maps, (223, 97))), torch.zeros(1, 223, 97))


def test_a_constant_and_a_real_map_in_one_batch_do_not_touch() -> None:
    maps = torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.1, 0.1001, 0.1002, 0.1003]], dtype=torch.float64)
    wanted = torch.tensor([[0, 0, 0, 0], [0, 1 / 3, 2 / 3, 1]], dtype=torch.float64)
    torch.testing.assert_close(stretch(maps), wanted)


def test_what_is_not_finite_stays_so() -> None:
    assert not stretch(torch.tensor([[0.0, torch.inf]])).isfinite().all()
    assert stretch(torch.tensor([[0.0, torch.nan]])).isnan().any()


@pytest.mark.parametrize("method", ["gradcam", "hirescam", "eigencam", "scorecam"])
@pytest.mark.parametrize("seed", range(5))
def test_the_map_of_a_constant_image_is_zero(method: str, seed: int) -> None:
    model = photo()
    torch.manual_seed(seed)
    for layer in (model[0], model[4]):
        layer.reset_parameters()
    found = cam(model, torch.full((1, 3, 23, 23), 0.37), 1, method=method, progress=False)
    assert not found.map.any()


# -- frozen models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gradcam", "eigencam"])
@pytest.mark.parametrize("trainable", ["all", "head", "none"])
def test_the_layer_for_token_ids_does_not_depend_on_what_is_frozen(trainable: str, method: str) -> None:
    model, ids = Text().eval(), torch.arange(12).reshape(2, 6)
    wanted = cam(model, ids, 1, "first", method)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable == "all" or (trainable == "head" and name.startswith("head")))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    found = cam(model, ids, 1, method=method)
    # What reads the first token out comes behind it; the keys and values of the last block still count.
    assert found.layer.startswith("first")
    assert found.chosen
    torch.testing.assert_close(found.raw, cam(model, ids, 1, found.layer, method).raw)
    assert found.raw.shape == wanted.raw.shape
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())


def test_a_frozen_model_is_frozen_after_an_error_too() -> None:
    model = Text().eval().requires_grad_(False)

    def fails(output: Tensor) -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cam(model, torch.arange(6)[None], fails)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_frozen_bert_has_maps() -> None:
    model = made("bert", "BertForSequenceClassification")
    ids = {"input_ids": torch.randint(0, 64, (1, 12))}
    wanted = cam(model, ids, 1)
    found = cam(model.requires_grad_(False), ids, 1)
    assert found.layer == wanted.layer
    torch.testing.assert_close(found.raw, wanted.raw)
    assert cam(model, ids, 1, method="eigencam").layer == wanted.layer


# -- targets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        (np.int64(3), [3, 3]),
        (np.uint8(3), [3, 3]),
        (np.array([3, 1]), [3, 1]),
        (np.array(3), [3, 3]),
        ([np.int32(3), torch.tensor(1)], [3, 1]),
        (torch.tensor(3), [3, 3]),
    ],
)
def test_numbers_of_numpy_and_torch_are_classes(target: Any, classes: list[int]) -> None:
    assert cam(photo(), torch.randn(2, 3, 9, 9), target).target == classes


@pytest.mark.parametrize("target", [3.0, np.float32(3), np.array([3.0, 1.0]), torch.tensor(3.0), [1.0, 2.0], "cat"])
def test_what_is_not_a_class_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="target: give a class"):
        cam(photo(), torch.randn(2, 3, 9, 9), target)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        cam(photo(), torch.randn(0, 3, 9, 9))


# -- layouts ----------------------------------------------------------------------------------------


def test_a_layer_with_uneven_strides_has_the_map_of_the_formula() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d((8, 1)), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    x = torch.randn(1, 1, 32, 64)
    found = cam(model, x, 1, "0.3", layout="channels_first")
    # The gradient of the mean over 4 × 64 places is the weight over 256 everywhere.
    by_hand = (model[3].weight[1][:, None, None] / 256 * features(x)[0]).sum(0)
    torch.testing.assert_close(found.raw[0], by_hand.detach())


def test_a_models_own_train_method_is_not_called() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Merges(4, 2))
    weight = model[3].weight.detach().clone()
    cam(model, torch.randn(1, 3, 16, 16), 1, layer="0")
    assert torch.equal(model[3].weight, weight)
    assert model[3].training


def test_classes_are_called_by_their_names_where_these_are_known() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.rand(2, 3, 8, 8)
    assert cam(model, x, [1, 2]).names is None
    seen = cam(model, x, [1, 2], labels=["cat", "dog"])
    assert seen.names == ["dog (1)", "class 2"]
    assert "target [dog (1), class 2]" in repr(seen)
    titles = [ax.get_title() for ax in seen.overlay(x).axes[:2]]
    assert titles == ["dog (1)", "class 2"]
    assert seen.overlay(x, titles=["a", "b"]).axes[0].get_title() == "a"
    assert cam(model, x, lambda output: output[:, 0], labels=["cat", "dog"]).names is None


def test_a_model_of_torchvisions_is_explained_by_the_names_of_its_classes() -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    torch.manual_seed(0)
    model, x = models.resnet18().eval(), torch.rand(1, 3, 64, 64)
    assert cam(model, x, 285).names is None  # of random weights, no class has a meaning
    with torch.no_grad():
        model.bn1.weight.add_(0.1)  # trained, as far as that can be told
    assert cam(model, x, 285).names == ["Egyptian cat (285)"]
