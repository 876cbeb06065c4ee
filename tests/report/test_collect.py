"""What a report knows, against bare PyTorch hooks; and the model, which must not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.report.nets import Broken, Photo, Text
from torchhook._report.collect import collect
from torchhook._report.facts import LayerFacts, Page
from torchhook._values.tree import Inputs

X = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
IDS = torch.tensor([[3, 7, 7, 1, 9]])


def layer(page: Page, path: str) -> LayerFacts:
    return next(found for found in page.layers if found.path == path)


def watched(model: nn.Module, x: Any) -> dict[str, Tensor]:
    """The oracle: clones taken by bare hooks."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.setdefault(name, output.detach().clone())

        return keep

    handles = [m.register_forward_hook(hook(name)) for name, m in model.named_modules()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def snapshot(model: nn.Module) -> Any:
    def plain(tensor: Tensor | None) -> Any:
        return None if tensor is None else (tensor.detach().numpy().tobytes(), tensor.requires_grad)

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: plain(t) for name, t in tensors.items()},
        {name: plain(p.grad) for name, p in model.named_parameters()},
        {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        torch.get_rng_state().numpy().tobytes(),
    )


def test_shapes_and_statistics_are_those_that_bare_hooks_see_before_anything_is_overwritten() -> None:
    model = Photo().eval()
    page, truth = collect(model, X, cam=None), watched(model, X)
    assert {found.path for found in page.layers if found.ran} == truth.keys()
    for path, value in truth.items():
        call = layer(page, path).calls[0]
        assert call.shape == str(tuple(value.shape))
        assert call.dtype == "float32"
        assert call.nbytes == value.nbytes
        assert call.value is not None
        assert call.value.mean == pytest.approx(float(value.double().mean()), abs=1e-6)
        assert call.value.max == pytest.approx(float(value.max()))
        assert call.value.min == pytest.approx(float(value.min()))


def test_gradients_are_those_of_the_target_class() -> None:
    model = Photo().eval()
    page = collect(model, X, target=2, cam=None)
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: seen.update(g=grad.clone()))

    model.stem[0].register_forward_hook(keep)
    model(X)[:, 2].sum().backward()
    found = layer(page, "stem.0").calls[0].gradient
    assert found is not None
    assert found.norm == pytest.approx(float(seen["g"].norm()), rel=1e-5)
    weight = next(w for w in layer(page, "stem.0").weights if w.name == "weight")
    grad = model.stem[0].weight.grad
    assert grad is not None
    assert weight.gradient == pytest.approx(float(grad.square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_does_not_notice(training: bool) -> None:
    model = Photo().train(training)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.stem[0].weight.requires_grad_(False)
    x, before = X.clone(), snapshot(model)
    collect(model, x)
    assert snapshot(model) == before
    assert torch.equal(x, X)
    assert not x.requires_grad


def test_the_model_does_not_notice_when_it_raises() -> None:
    class Raises(Photo):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("mine")

    model = Raises().train()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mine"):
        collect(model, X)
    assert snapshot(model) == before


def test_a_frozen_text_model_has_gradients_and_stays_frozen() -> None:
    model = Text().eval().requires_grad_(False)
    page = collect(model, {"input_ids": IDS}, tokens=["a", "b", "c", "d", "e"])
    found = layer(page, "embed").calls[0].gradient
    assert found is not None
    assert found.norm is not None
    assert found.norm > 0
    assert not any(p.requires_grad for p in model.parameters())
    assert [token.text for token in page.tokens] == ["a", "b", "c", "d", "e"]
    assert max(token.weight or 0 for token in page.tokens) == 1.0


def test_tokens_are_numbers_where_no_text_is_given() -> None:
    assert [token.text for token in collect(Text().eval(), IDS).tokens] == ["3", "7", "7", "1", "9"]


def test_attention_has_a_picture_for_each_head() -> None:
    page = collect(Text().eval(), IDS)
    (made,) = [sprite for found in page.layers for call in found.calls for sprite in call.attention]
    assert made.labels == ["mean", "head 0", "head 1"]
    assert "5 queries" in made.what


def test_an_image_comes_with_a_class_activation_map() -> None:
    page = collect(Photo().eval(), X, target=1)
    assert page.picture is not None
    assert page.picture.overlay.startswith("data:image/")
    assert "class 1" in page.picture.caption
    assert page.score == "class 1, summed over the batch"


def test_the_map_of_a_function_is_that_of_the_function() -> None:
    model = Photo().eval()
    other = int(model(X[:1]).argmin())

    def least(output: Tensor) -> Tensor:
        return output[0, other]

    asked, known = collect(model, X[:1], target=least).picture, collect(model, X[:1], target=other).picture
    assert asked is not None
    assert known is not None
    assert asked.overlay == known.overlay != ""
    assert asked.caption.startswith("gradcam of least(output) at ")
    predicted = collect(model, X[:1]).picture
    assert predicted is not None
    assert predicted.overlay != asked.overlay


def test_a_function_of_a_batch_has_no_map_and_the_page_says_so() -> None:
    page = collect(Photo().eval(), X, target=lambda output: output[:, 1].sum())
    assert page.picture is not None
    assert page.picture.overlay == ""
    assert "No class activation map: the target is a function of the whole batch" in page.notes[0]


def test_a_map_that_fails_for_no_known_reason_is_told_with_the_kind_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("torchhook._report.collect.cam", fails)
    assert collect(Photo().eval(), X[:1]).notes == ["No class activation map: KeyError: 'x'"]


def test_a_function_of_each_sample_has_the_map_of_the_first() -> None:
    model = Photo().eval()
    asked = collect(model, X, target=lambda output: output[:, 1])
    known = collect(model, X, target=1).picture
    assert asked.picture is not None
    assert known is not None
    assert asked.picture.overlay == known.overlay != ""
    assert not asked.notes


@pytest.mark.parametrize("inputs", [X, (X,), {"x": X}, Inputs((), {"x": X})], ids=["one", "tuple", "dict", "both"])
def test_inputs_are_given_as_everywhere(inputs: Any) -> None:
    page = collect(Photo().eval(), inputs, repeats=1)
    assert page.layers[0].calls[0].shape == "(2, 5)"
    assert page.picture is not None
    assert page.picture.overlay


@pytest.mark.parametrize("train", [False, True])
def test_a_report_says_in_which_mode_the_model_ran(train: bool) -> None:
    modes: list[bool] = []
    model = Photo().train(not train)
    model.stem[0].register_forward_hook(lambda module, args, output: modes.append(module.training))
    page = collect(model, X, train=train, cam=None, attention=False, repeats=1)  # maps are those of evaluation mode
    assert set(modes) == {train}
    assert dict(page.about)["mode"] == ("train" if train else "eval")
    assert model.training is not train


def test_an_image_in_place_of_the_input_is_whatever_is_one() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    white = np.full((9, 11, 3), 255, np.uint8)
    shown = [
        collect(nn.Flatten(), torch.zeros(1, 4), image=image, repeats=1).picture
        for image in (white, torch.from_numpy(white), torch.ones(3, 9, 11), pillow.fromarray(white), np.ones((9, 11)))
    ]
    assert [picture and (picture.width, picture.height) for picture in shown] == [(11, 9)] * 5
    assert len({picture and picture.uri for picture in shown}) == 1


def test_the_caption_names_the_class_where_the_score_is_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    page = collect(model.eval(), X[:1])
    assert page.picture is not None
    assert page.picture.caption.startswith("gradcam of class 0 at ")
    assert page.score == "the mean square of the output"


def test_a_method_that_is_not_known_is_refused_before_anything_runs() -> None:
    def run(*args: Any) -> None:
        raise AssertionError("it ran")

    model = Photo()
    model.register_forward_pre_hook(run)
    with pytest.raises(ValueError, match="method='foo' is not known"):
        collect(model, X, cam="foo")


def test_time_is_measured_for_every_layer_that_ran_and_parents_take_longer() -> None:
    page = collect(Photo().eval(), X, cam=None)
    for found in page.layers:
        assert (found.seconds is not None) == bool(found.ran)
        if found.ran and found.path:
            parent = page.layers[found.parent].seconds
            assert parent is not None
            assert found.seconds is not None
            assert found.seconds <= parent


def test_trouble_is_found() -> None:
    page = collect(Broken().eval(), X)
    found = {finding.kind: finding for finding in page.findings}
    names = {kind: [page.layers[i].path for i, _ in finding.layers] for kind, finding in found.items()}
    assert names["nan"][0] == "bad"
    assert names["dead"] == ["relu"]
    assert found["dead"].layers[0][1] == "3 of 8"
    assert any("map" in note for note in page.notes)


def test_a_nan_is_traced_to_the_call_that_made_it() -> None:
    class Late(Broken):
        def forward(self, x: Tensor) -> Tensor:
            return self.relu(super().forward(x))  # the same layer again, on what is broken by now

    page = collect(Late().eval(), X, cam=None)
    nan = next(finding for finding in page.findings if finding.kind == "nan")
    order = [page.layers[i].path for i, note in nan.layers if "output" in note]
    assert order == ["bad", "relu", ""]


def test_a_layer_that_never_ran_is_named_with_the_likely_cause() -> None:
    page = collect(Photo().eval(), X, cam=None)
    (silent,) = [finding for finding in page.findings if finding.kind == "silent"]
    assert [page.layers[i].path for i, _ in silent.layers] == ["unused"]
    assert "without calling it" in silent.layers[0][1]


def test_a_shared_module_points_to_its_first_name() -> None:
    page = collect(Broken().eval(), X, cam=None)
    again = layer(page, "again")
    assert again.shared_with is not None
    assert page.layers[again.shared_with].path == "relu"
    assert again.ran == 1


def test_calls_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x - 1) + 3)

    page = collect(Twice(), torch.zeros(1, 4))
    maxima = [call.value.max for call in layer(page, "act").calls if call.value]
    assert layer(page, "act").ran == 2
    assert maxima == [0.0, 3.0]


def test_without_gradients_nothing_is_differentiated() -> None:
    page = collect(Photo().eval(), X, gradients=False, cam=None)
    assert all(call.gradient is None for found in page.layers for call in found.calls)


def test_a_model_that_cannot_be_differentiated_says_so() -> None:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).long()

    assert collect(Sign(), torch.ones(2, 3)).notes == ["No gradients: the output holds no floating-point tensor."]


def test_nested_outputs_are_measured_at_their_first_floating_point_tensor() -> None:
    page = collect(nn.LSTM(3, 4), torch.rand(5, 2, 3))
    call = page.layers[0].calls[0]
    assert call.shape == "((5, 2, 4), ((1, 2, 4), (1, 2, 4)))"
    assert call.leaf == "0"
    assert call.value is not None
    assert call.value.elements == 40


@pytest.mark.shows("Lazy modules: report", error="ValueError")
def test_a_lazy_model_is_refused_and_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        collect(model, torch.ones(1, 2))
    assert model[0].has_uninitialized_params()


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Sum(), torch.ones(3)),
        (nn.Linear(2, 3, device="meta"), torch.ones(1, 2, device="meta")),
        (nn.Identity(), torch.ones(2, 3, dtype=torch.cfloat)),
        (nn.Identity(), torch.empty(0, 3)),
        (nn.Linear(2, 3).bfloat16(), torch.ones(1, 2).bfloat16()),
        (nn.Conv3d(1, 2, 3), torch.ones(1, 1, 8, 8, 8)),
        (nn.Conv1d(1, 2, 3), torch.ones(1, 1, 16)),
    ],
)
def test_odd_values_do_not_stop_a_report(model: nn.Module, x: Tensor) -> None:
    page = collect(model, x)
    assert page.layers[0].ran == 1
    assert page.layers[0].calls[0].shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("gradients", [True, False])
def test_ragged_values_have_no_pictures_and_do_not_stop_a_report(gradients: bool) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            ragged = self.inside(torch.nested.as_nested_tensor([x[0], x[1, :3]]))
            return torch.nested.to_padded_tensor(ragged, 0.0).mean(1)

    page = collect(Ragged(), torch.rand(2, 6, 8), gradients=gradients, repeats=1)
    (call,) = layer(page, "inside").calls
    assert (call.shape, call.maps) == ("(2, ragged)", None)


def test_an_input_made_in_inference_mode_can_be_reported_on() -> None:
    with torch.inference_mode():
        x = torch.rand(1, 2)
    assert layer(collect(nn.Linear(2, 3), x), "").calls[0].gradient is not None


@pytest.mark.shows("Gradient modes: report")
def test_a_report_can_be_made_in_inference_mode() -> None:
    model = nn.Linear(2, 3)
    with torch.inference_mode():
        page = collect(model, torch.rand(1, 2))
    assert layer(page, "").calls[0].gradient is not None
    with torch.inference_mode():
        born = nn.Linear(2, 3)
    assert "inference mode" in collect(born, torch.rand(1, 2)).notes[0]


def test_long_sequences_have_no_attention_maps_and_say_so() -> None:
    page = collect(Text().eval(), torch.zeros(1, 1100, dtype=torch.long), gradients=False, repeats=0)
    assert not any(call.attention for found in page.layers for call in found.calls)
    assert "1,100 tokens are too many" in page.notes[0]
