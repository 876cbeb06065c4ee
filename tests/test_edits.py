"""Edits: each of the catalogue against values worked out by hand, wherever a value passes, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.language_models import small_gpt2
from tests.models import Apply
from tests.oracle import BareHooks, assert_same, freeze, in_threads, snapshot
from torchhook import edits
from torchhook._core.select import resolve
from torchhook.errors import EditError, NeverRanWarning, SelectorError
from torchhook.types import Session, Site


class Pass(nn.Module):
    """Gives on what it gets, as a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


def chain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]])


def edited(edit: Any, x: Tensor = X, site: str = "0") -> Tensor:
    model = chain(Pass(), Pass())
    with th.edit(model, {site: edit}):
        return model(x)


# -- the catalogue ------------------------------------------------------------------------------------------------

BY_HAND: dict[str, tuple[Any, Tensor]] = {
    "replace by a number": (edits.replace(7), torch.full((2, 3), 7.0)),
    "replace by a row": (edits.replace(torch.tensor([1.0, 2, 3])), torch.tensor([[1.0, 2, 3], [1, 2, 3]])),
    "replace by a whole": (edits.replace(torch.ones(2, 3)), torch.ones(2, 3)),
    "replace casts": (edits.replace(torch.ones(2, 3, dtype=torch.float64)), torch.ones(2, 3)),
    "add a number": (edits.add(1), torch.tensor([[2.0, -1, 4], [-3, 6, 7]])),
    "add a row": (edits.add(torch.tensor([10.0, 20, 30])), torch.tensor([[11.0, 18, 33], [6, 25, 36]])),
    "add a column": (edits.add(torch.tensor([[10.0], [20]])), torch.tensor([[11.0, 8, 13], [16, 25, 26]])),
    "scale": (edits.scale(-2), torch.tensor([[-2.0, 4, -6], [8, -10, -12]])),
    "zero": (edits.zero(), torch.zeros(2, 3)),
    "mean over the batch": (edits.mean(), torch.tensor([[-1.5, 1.5, 4.5]] * 2)),
    "mean over features": (edits.mean(-1), torch.tensor([[2 / 3] * 3, [7 / 3] * 3])),
    "mean over both": (edits.mean([0, 1]), torch.full((2, 3), 1.5)),
    "clamp": (edits.clamp(-1, 4), torch.tensor([[1.0, -1, 3], [-1, 4, 4]])),
    "clamp below": (edits.clamp(low=0), torch.tensor([[1.0, 0, 3], [0, 5, 6]])),
    "clamp above": (edits.clamp(high=0), torch.tensor([[0.0, -2, 0], [-4, 0, 0]])),
    "a function": (lambda v: v.abs(), X.abs()),
    "a function of value and site": (lambda v, site: v + len(site.path), X + 1),
    "a function whose second parameter has a default": (lambda v, factor=2.0: v * factor, X * 2),
    "a builtin": (torch.neg, -X),
    "a function of torch that could work in place": (F.relu, X.relu()),
    "a module": (nn.ReLU(), X.relu()),
    "nothing returned": (lambda v: None, X),
    "several in order": ([edits.add(1), edits.scale(2), lambda v: None, edits.add(-1)], (X + 1) * 2 - 1),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("site", ["0", "1:input", "0/mul", "1/mul:input"])
def test_an_edit_does_what_one_computes_by_hand(name: str, site: str) -> None:
    edit, expected = BY_HAND[name]
    if name == "a function of value and site":
        expected = X + len(site.partition(":")[0].partition("/")[0])
    if site.endswith("/mul:input"):  # two arguments, x and 1: name the first
        edit = edits.at("args.0", edit)
    torch.testing.assert_close(edited(edit, site=site), expected)


def test_edits_leave_the_passing_value_as_it_was() -> None:
    for name, (edit, _) in BY_HAND.items():
        x = X.clone()
        model = chain(nn.Identity())
        with th.edit(model, {"0": edit}):
            model(x)
        assert torch.equal(x, X), name


def test_replace_survives_a_layer_that_works_in_place() -> None:
    new = torch.tensor([[-1.0, 2.0]])
    model = chain(Pass(), nn.ReLU(inplace=True))
    with th.edit(model, {"0": edits.replace(new)}):
        assert torch.equal(model(torch.zeros(1, 2)), torch.tensor([[0.0, 2.0]]))
    assert torch.equal(new, torch.tensor([[-1.0, 2.0]]))


def test_replacing_a_nested_value_survives_a_model_that_works_in_place() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Apply(lambda x: (x + 1, x + 2))

        def forward(self, x: Tensor) -> Any:
            return self.two(x)[0].mul_(2)

    new, model = (torch.ones(2), torch.ones(2)), Doubles()
    with th.edit(model, {"two": edits.replace(new)}):
        assert torch.equal(model(torch.zeros(2)), torch.full((2,), 2.0))
    assert torch.equal(new[0], torch.ones(2))


def test_noise_has_the_asked_size_and_leaves_the_models_random_numbers_alone() -> None:
    model = chain(Pass(), nn.Dropout(0.5))
    torch.manual_seed(5)
    plain = model(torch.ones(100, 100))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with th.edit(model, {"0": edits.noise(0.1)}):
        noisy = model(torch.ones(100, 100))
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(noisy == 0, plain == 0)
    noise = (noisy[noisy != 0] / 2) - 1
    assert noise.std() == pytest.approx(0.1, rel=0.05)
    assert noise.mean() == pytest.approx(0, abs=0.01)


def test_noise_is_the_same_for_the_same_seed_and_new_at_each_call() -> None:
    model = chain(Pass())

    def twice(seed: int) -> list[Tensor]:
        with th.edit(model, {"0": edits.noise(1.0, seed=seed)}):
            return [model(torch.zeros(2, 3)), model(torch.zeros(2, 3))]

    one, again, other = twice(1), twice(1), twice(2)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


def test_integers_and_masks_are_not_scaled() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 1, x > 0, x.long()

    model = chain(Both())
    with th.edit(model, {"0": [edits.scale(3.0), edits.noise(0.0), edits.clamp(-1, 1), edits.mean()]}):
        floats, mask, integers = model(X)
    assert torch.equal(floats, torch.tensor([[0.0, 0, 1]] * 2))
    assert torch.equal(mask, X > 0)
    assert torch.equal(integers, X.long())


def test_half_precision_stays_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for edit in (edits.add(1.0), edits.add(torch.ones(3)), edits.noise(0.1), edits.mean(), edits.replace(2.0)):
            assert edited(edit, X.to(dtype)).dtype == dtype


def test_clamp_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="needs a low limit, a high limit or both"):
        edits.clamp()


def doubled(value: Tensor) -> Tensor:
    return value * 2


def sited(value: Tensor, site: Site) -> Tensor:
    return value + len(site.path)


def recorded(number: float = 1.0) -> th.Recording:
    _, rec = th.run(chain(Pass(), Pass()), torch.full((2, 3), number), capture="*")
    return rec


AS_WRITTEN: dict[str, Callable[[], Any]] = {
    "edits.scale(2.0)": lambda: edits.scale(2.0),
    "edits.scale(3)": lambda: edits.scale(3),
    "edits.add((2, 3))": lambda: edits.add(torch.zeros(2, 3)),
    "edits.add((768,))": lambda: edits.add(torch.arange(768.0)),
    "edits.add(tensor([1.0, 2.0, 3.0]))": lambda: edits.add(torch.tensor([1.0, 2.0, 3.0])),
    "edits.add(1.5)": lambda: edits.add(1.5),
    "edits.replace(7)": lambda: edits.replace(7),
    "edits.replace((tensor([0.0]), None))": lambda: edits.replace((torch.zeros(1), None)),
    "edits.zero()": lambda: edits.zero(),
    "edits.mean()": lambda: edits.mean(),
    "edits.mean((0, 1))": lambda: edits.mean([0, 1]),
    "edits.clamp(-1, 4)": lambda: edits.clamp(-1, 4),
    "edits.clamp(high=4)": lambda: edits.clamp(high=4),
    "edits.noise(0.1)": lambda: edits.noise(0.1),
    "edits.noise(0.1, seed=3)": lambda: edits.noise(0.1, seed=3),
    "edits.patch(<Recording of Sequential: 2 sites, 48 B>)": lambda: edits.patch(recorded()),
    "edits.patch(<Recording of Sequential: 2 sites, 48 B>, [0, 1], dim=0)": lambda: edits.patch(
        recorded(), [0, 1], dim=0
    ),
    "edits.patch(<Recording of Sequential: 2 sites, 48 B>, slice(1, 4, None))": lambda: edits.patch(
        recorded(), slice(1, 4)
    ),
    "edits.patch(<Recording of Sequential: 2 sites, 48 B>, mask=(2, 3), source='1')": lambda: edits.patch(
        recorded(), mask=X > 0, source="1"
    ),
    "edits.at('0', edits.add((9,)))": lambda: edits.at("0", edits.add(torch.ones(9))),
    "edits.at('1.deep.0', [edits.add(1.0), doubled, sited])": lambda: edits.at(
        "1.deep.0", [edits.add(1.0), doubled, sited]
    ),
    "edits.at('0', relu)": lambda: edits.at("0", torch.relu),
}


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_edits_say_what_they_are(text: str) -> None:
    assert repr(AS_WRITTEN[text]()) == text


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_edits_are_values(text: str) -> None:
    edit = AS_WRITTEN[text]()
    for again in (AS_WRITTEN[text](), pickle.loads(pickle.dumps(edit)), copy.deepcopy(edit)):
        assert again == edit
        assert hash(again) == hash(edit)
        assert repr(again) == text
    for other, make in AS_WRITTEN.items():
        assert (make() == edit) is (other == text)
    assert edit != text


def test_edits_of_equal_looks_and_other_numbers_are_not_equal() -> None:
    assert edits.add(torch.zeros(2, 3)) != edits.add(torch.ones(2, 3))
    assert edits.at("0", edits.add(torch.zeros(9))) != edits.at("0", edits.add(torch.ones(9)))
    assert edits.patch(recorded(1.0)) != edits.patch(recorded(2.0))
    assert edits.patch(recorded(1.0)) == edits.patch(recorded(1.0))


@pytest.mark.parametrize("name", [name for name in BY_HAND if "function" not in name and "nothing" not in name])
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy], ids=["pickle", "copy"])
def test_an_edit_does_the_same_after_a_journey(name: str, travel: Callable[[Any], Any]) -> None:
    edit, expected = BY_HAND[name]
    if name == "several in order":
        edit = [step for step in edit if not inspect.isfunction(step)]
    torch.testing.assert_close(edited(travel(edit)), expected)


def test_a_patch_travels_with_its_recording(tmp_path: Path) -> None:
    model, clean, other = tokens()
    with torch.no_grad():
        _, rec = th.run(model, clean, capture="0")
        path = tmp_path / "edit.pt"
        torch.save(edits.patch(rec, [0, 3]), path)
        found, _ = th.run(model, other, edit={"0": torch.load(path, weights_only=False)})
        expected = model[0](other)
        expected[:, [0, 3]] = model[0](clean)[:, [0, 3]]
    assert torch.equal(found, expected.tanh())


def test_a_vector_that_is_trained_is_the_same_one_in_the_edit() -> None:
    vector = torch.zeros(3, requires_grad=True)
    edit = edits.add(vector)
    with torch.no_grad():
        vector += 1
    assert torch.equal(edited(edit).detach(), X + 1)


# -- patching -----------------------------------------------------------------------------------------------------


def tokens() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return chain(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 5, 4), torch.randn(2, 5, 4)


@pytest.mark.parametrize("positions", [2, [0, 3], slice(1, 4), torch.tensor([4, 1]), -1])
def test_patching_some_positions_leaves_the_others(positions: Any) -> None:
    model, clean, other = tokens()
    with torch.no_grad():
        expected, source = model[0](other), model[0](clean)
        expected[:, positions] = source[:, positions]
        _, rec = th.run(model, clean, capture="0")
        output, after = th.run(model, other, capture="0", edit={"0": edits.patch(rec, positions)})
    assert torch.equal(after["0"], expected)
    assert torch.equal(output, expected.tanh())


def test_patching_by_mask_dimension_and_source() -> None:
    model, clean, other = tokens()
    with torch.no_grad():
        _, rec = th.run(model, clean, capture=["0", "1"])
        mask = torch.zeros(2, 5, 1, dtype=torch.bool)
        mask[1, 2:] = True
        found, _ = th.run(model, other, edit={"1": edits.patch(rec, mask=mask)})
        assert torch.equal(found, torch.where(mask, model(clean), model(other)))
        found, _ = th.run(model, other, edit={"1": edits.patch(rec, [0], dim=-1)})
        assert torch.equal(found[..., 0], model(clean)[..., 0])
        assert torch.equal(found[..., 1:], model(other)[..., 1:])
        found, _ = th.run(model, other, edit={"1": edits.patch(rec, source="0")})
        assert torch.equal(found, model[0](clean))
    with pytest.raises(ValueError, match="not both"):
        edits.patch(rec, 1, mask=mask)


def test_patching_a_recording_of_another_shape_is_refused() -> None:
    model, clean, _ = tokens()
    _, rec = th.run(model, clean, capture="0")
    for edit in (edits.patch(rec), edits.patch(rec, 0)):
        with pytest.raises(
            EditError, match=r"0#0: the edit changes the shape: expected \(1, 5, 4\), found \(2, 5, 4\)"
        ):
            th.run(model, clean[:1], edit={"0": edit})


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 100 * q + 10 * k + v


class Calls(nn.Module):
    """Calls a child with one tensor in several places, or with another in each."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Attends()

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        return self.att(q, q if k is None else k, q if v is None else v)


@pytest.mark.parametrize("count", [1, 2, 3], ids=["one tensor", "two tensors", "three tensors"])
def test_a_value_with_one_tensor_in_several_places_is_patched_place_by_place(count: int) -> None:
    model, recorded = Calls(), [torch.full((1,), n) for n in (1.0, 2.0, 3.0)][:count]
    expected = model(*recorded)
    with th.capture(model, "att:input") as rec:
        model(*recorded)
    with th.edit(model, {"att:input": edits.patch(rec)}):
        assert torch.equal(model(torch.zeros(1)), expected)
        assert torch.equal(model(torch.zeros(1), torch.zeros(1), torch.zeros(1)), expected)


def test_patching_never_lets_the_model_write_into_the_recording() -> None:
    model = chain(Pass(), nn.ReLU(inplace=True))
    _, rec = th.run(model, X, capture="0")
    for edit in (edits.patch(rec), edits.patch(rec, [0, 1], dim=0), edits.patch(rec, mask=X > -9)):
        output, _ = th.run(model, torch.zeros(2, 3), edit={"0": edit})
        assert torch.equal(output, X.relu())
        assert torch.equal(rec["0"], X)


def test_each_call_is_patched_with_its_own_record() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Pass()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.step(x * k) for k in range(3)])

    model = Loop()
    _, rec = th.run(model, X, capture="step")
    found, _ = th.run(model, torch.zeros(2, 3), edit={"step": edits.patch(rec)})
    assert torch.equal(found, model(X))


def small_resnet() -> tuple[nn.Module, dict[str, Any]]:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None, num_classes=5).eval(), {"x": torch.randn(1, 3, 32, 32)}


@pytest.mark.parametrize("build", [small_resnet, small_gpt2])
def test_patching_a_layer_back_changes_nothing_to_the_bit(build: Any) -> None:
    model, kwargs = build()
    with torch.no_grad():
        with BareHooks(model) as bare:
            plain = freeze(model(**kwargs))
        for name, calls in bare.outputs.items():
            _, rec = th.run(model, kwargs=kwargs, capture=Site(name))
            output, after = th.run(model, kwargs=kwargs, capture=Site(name), edit={Site(name): edits.patch(rec)})
            assert_same(plain, freeze(output), f"the output with {name!r} patched")
            assert_same(calls[0], freeze(after.all(Site(name))[0]), name)
        _, rec = th.run(model, kwargs=kwargs, capture=[Site(name) for name in bare.outputs])
        every = {Site(name): edits.patch(rec) for name in bare.outputs}
        with th.edit(model, every):
            assert_same(plain, freeze(model(**kwargs)), "the output with every layer patched")


# -- where edits reach --------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor, extra: dict[str, Any] | None = None) -> Tensor:
        return x + 10 * y * scale + (0 if extra is None else extra["bias"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x * 2, scale=torch.tensor(3.0), extra={"bias": x * 0 + 1})


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ("args.0", lambda x: 0 + 60 * x + 1),
        ("args.1", lambda x: x + 1),
        ("kwargs.scale", lambda x: x + 1),
        ("kwargs.extra.bias", lambda x: x + 60 * x),
    ],
)
def test_arguments_and_keywords_are_edited_by_name(leaf: str, expected: Callable[[Tensor], Tensor]) -> None:
    model = Model()
    with th.edit(model, {"mix:input": edits.at(leaf, edits.zero())}):
        torch.testing.assert_close(model(X), expected(X))


def test_all_arguments_can_be_put_in_whole() -> None:
    model = Model()

    def swap(inputs: th.Inputs) -> th.Inputs:
        x, y = inputs.args
        return th.Inputs((y, x), inputs.kwargs)

    with th.edit(model, {"mix:input": swap}):
        torch.testing.assert_close(model(X), 2 * X + 30 * X + 1)


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 1, {"deep": [x * 2, None], "more": (x * 3,)}


def test_one_leaf_of_a_nested_value_is_edited_and_the_rest_is_the_same_object() -> None:
    model = chain(Nested())
    with th.edit(model, {"0": edits.at("1.deep.0", edits.add(1.0))}):
        first, rest = model(X)
    assert torch.equal(first, X)
    assert torch.equal(rest["deep"][0], X * 2 + 1)
    assert rest["deep"][1] is None
    assert torch.equal(rest["more"][0], X * 3)
    assert type(rest["more"]) is tuple


def test_the_hidden_state_of_an_lstm_is_edited_by_its_address() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    plain, (hidden, cell) = model(x)
    with th.edit(model, {"0": edits.at("1.0", edits.zero())}):
        out, (h, c) = model(x)
    assert torch.equal(h, torch.zeros_like(hidden))
    assert torch.equal(c, cell)
    assert torch.equal(out, plain)


def test_a_branch_of_a_nested_value_can_be_edited_as_a_whole() -> None:
    model = chain(Nested())
    with th.edit(model, {"0": edits.at("1", edits.scale(2.0))}):
        first, rest = model(X)
    assert torch.equal(first, X)
    assert torch.equal(rest["deep"][0], X * 4)
    assert torch.equal(rest["more"][0], X * 6)


def test_model_outputs_keep_their_type() -> None:
    model, kwargs = small_gpt2()
    plain = model(**kwargs)
    with th.edit(model, {"transformer": edits.at("last_hidden_state", edits.zero())}):
        output = model(**kwargs)
    assert type(output) is type(plain)
    assert torch.equal(output.logits, torch.zeros_like(output.logits))


def test_edits_reach_operations() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x, -1) @ x

    model, x = Attend(), torch.randn(3, 3)
    with th.edit(model, {"/softmax": edits.replace(torch.eye(3))}):
        assert torch.equal(model(x), x)
    with th.edit(model, {"/softmax:input": edits.at("args.0", edits.zero())}):
        torch.testing.assert_close(model(x), x.mean(0).expand(3, 3))


def test_edits_reach_gradients() -> None:
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    leaf = X.clone().requires_grad_()
    with torch.no_grad():
        mask = (model[0](X) > 0).float()
    through = torch.ones(2, 3) @ model[2].weight.detach() * mask

    with th.edit(model, {"0:grad": edits.clamp(-0.1, 0.1)}):
        model(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, through.clamp(-0.1, 0.1) @ model[0].weight.detach())
    torch.testing.assert_close(model[0].weight.grad, through.clamp(-0.1, 0.1).T @ X)

    leaf.grad = None
    with th.edit(model, {"0:grad_input": edits.scale(2.0), "1:grad_input": edits.add(1.0)}):
        model(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (through + 1) @ model[0].weight.detach())


def test_edits_reach_the_gradients_of_parameters() -> None:
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 3), nn.Linear(3, 1))
    model(X).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with th.capture(model, "0.weight:grad", edit={"0.weight:grad": [edits.scale(2.0), edits.add(1.0)]}) as rec:
        model(X).sum().backward()
    expected["0.weight"] = expected["0.weight"] * 2 + 1
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    torch.testing.assert_close(rec["0.weight:grad"], expected["0.weight"])


def test_all_gradients_of_a_structured_output_are_edited() -> None:
    model, x = nn.Sequential(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    with th.capture(model, "0:grad", edit={"0:grad": edits.scale(2.0)}) as rec:
        out, (hidden, cell) = model(x)
        (out.sum() + 3 * hidden.sum() + 5 * cell.sum()).backward()
    out_grad, (hidden_grad, cell_grad) = rec["0:grad"]
    assert torch.equal(out_grad, torch.full_like(out, 2.0))
    assert torch.equal(hidden_grad, torch.full_like(hidden, 6.0))
    assert torch.equal(cell_grad, torch.full_like(cell, 10.0))


def lstm_gradients(score: Callable[[Tensor, Tensor], Tensor], change: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    with th.edit(model, {":grad": change}) if change is not None else contextlib.nullcontext():
        output, (hidden, _) = model(torch.randn(5, 2, 3))
        score(output, hidden).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_one_part_of_a_structured_gradient_is_edited() -> None:
    found = lstm_gradients(lambda out, hidden: out.sum() + hidden.sum(), edits.at("0", edits.add(torch.ones(4))))
    torch.testing.assert_close(found, lstm_gradients(lambda out, hidden: 2 * out.sum() + hidden.sum()))


def test_every_part_of_a_structured_gradient_is_averaged_by_itself() -> None:
    weights = torch.tensor([[1.0], [3.0]])  # one for each of the batch, which is the second dimension
    found = lstm_gradients(lambda out, hidden: (out * weights).sum() + (hidden * weights).sum(), edits.mean(1))
    torch.testing.assert_close(found, lstm_gradients(lambda out, hidden: 2 * out.sum() + 2 * hidden.sum()))


def test_the_gradient_of_a_tied_weight_is_edited_once() -> None:
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model(X).sum().backward()
    expected = model[0].weight.grad / 2
    model.zero_grad()
    with th.edit(model, {"**.weight:grad": edits.scale(0.5)}):
        model(X).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_a_parameter_itself_is_not_edited() -> None:
    with pytest.raises(SelectorError, match=r"'0.weight' is a parameter.*only its gradient can be edited"):
        th.edit(chain(nn.Linear(3, 3)), {"0.weight": edits.zero()})


def test_zeroing_a_residual_branch_is_the_model_without_it() -> None:
    model, kwargs = small_gpt2()
    with torch.no_grad():
        blocks = model.transformer
        hidden = blocks.wte(kwargs["input_ids"]) + blocks.wpe(torch.arange(6))
        first = blocks.h[0]
        hidden = hidden + first.mlp(first.ln_2(hidden))  # no attention in the first block
        for block in blocks.h[1:]:
            hidden = block(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        expected = model.lm_head(blocks.ln_f(hidden))
        with th.edit(model, {"transformer.h.0.attn": edits.at("0", edits.zero())}):
            assert torch.equal(model(**kwargs).logits, expected)


def test_zeroing_a_branch_of_a_resnet_is_the_shortcut_alone() -> None:
    model, _ = small_resnet()
    block, x = model.layer1[0], torch.randn(1, 64, 8, 8)
    with torch.no_grad(), th.edit(model, {"layer1.0.bn2": edits.zero()}):
        assert torch.equal(block(x), x.relu())


# -- order, nesting, calls ----------------------------------------------------------------------------------------


def test_edits_compose_in_the_order_written() -> None:
    model = chain(Pass())
    with th.edit(model, {"0": [edits.add(1.0), edits.scale(2.0)]}):
        assert torch.equal(model(X), (X + 1) * 2)
    with th.edit(model, {"0": [edits.scale(2.0), edits.add(1.0)]}):
        assert torch.equal(model(X), X * 2 + 1)
    with th.edit(model, {"0": edits.add(1.0), "*": edits.scale(2.0)}):
        assert torch.equal(model(X), (X + 1) * 2)


def test_sessions_nest_and_the_outer_ones_edits_come_first() -> None:
    model = chain(Pass())
    with th.edit(model, {"0": edits.add(1.0)}):
        with th.edit(model, {"0": edits.scale(2.0)}):
            assert torch.equal(model(X), (X + 1) * 2)
        assert torch.equal(model(X), X + 1)
    assert torch.equal(model(X), X)


def test_overlapping_sessions_end_in_any_order() -> None:
    model = chain(Pass())
    one, two = th.edit(model, {"0": edits.add(1.0)}), th.edit(model, {"0": edits.scale(2.0)})
    one.open()
    two.open()
    model(X)
    one.close()
    assert torch.equal(model(X), X * 2)
    two.close()
    assert torch.equal(model(X), X)


def test_an_inner_capture_sees_what_an_outer_edit_did() -> None:
    model = chain(Pass())
    with th.edit(model, {"0": edits.add(1.0)}):
        _, rec = th.run(model, X, capture="0", edit={"0": edits.scale(2.0)})
    assert torch.equal(rec["0"], (X + 1) * 2)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Pass()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.step(x) for _ in range(3)])


def test_an_edit_of_one_call_leaves_the_others() -> None:
    model = Loop()
    with th.edit(model, {"step#1": edits.zero()}):
        assert torch.equal(model(X), torch.stack([X, torch.zeros(2, 3), X]))
    with th.edit(model, {"step#0:input": edits.add(1.0), "step#2": edits.scale(2.0)}):
        assert torch.equal(model(X), torch.stack([X + 1, X, X * 2]))
    with th.edit(model, {"step/mul#2": edits.zero()}):
        assert torch.equal(model(X), torch.stack([X, X, torch.zeros(2, 3)]))


def test_the_gradient_of_one_call_is_edited_alone() -> None:
    model, leaf = Loop(), X.clone().requires_grad_()
    with th.edit(model, {"step#1:grad": edits.scale(10.0)}):
        model(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 12.0))


def test_an_edit_is_told_the_site_and_the_call() -> None:
    seen: list[Site] = []
    model = Loop()
    note = lambda value, site: seen.append(site)  # noqa: E731
    with th.edit(model, {"step": note, "step:input": note, "step/mul": note, "step#1:grad": note}):
        model(X.clone().requires_grad_()).sum().backward()
    assert seen.count(Site("step", call=1)) == 1
    assert Site("step", call=2, port="input") in seen
    assert Site("step", "mul", 0) in seen
    assert Site("step", call=1, port="grad") in seen
    assert len(seen) == 10


def test_capture_sees_the_value_after_the_edits_or_before_when_asked() -> None:
    model = chain(Pass(), Pass())
    change = {"0": edits.add(1.0), "1:input": edits.scale(2.0), "1/mul": edits.add(-1.0)}
    sites = ["0", "1:input", "1/mul"]
    _, after = th.run(model, X, capture=sites, edit=change)
    assert torch.equal(after["0"], X + 1)
    assert torch.equal(after["1:input"], (X + 1) * 2)
    assert torch.equal(after["1/mul"], (X + 1) * 2 - 1)
    output, before = th.run(model, X, capture=sites, edit=change, before_edits=True)
    assert torch.equal(output, (X + 1) * 2 - 1)
    assert torch.equal(before["0"], X)
    assert torch.equal(before["1:input"], X + 1)
    assert torch.equal(before["1/mul"], (X + 1) * 2)


def test_before_edits_holds_for_gradients_and_single_calls() -> None:
    model, leaf = chain(Pass(), Loop()), X.clone().requires_grad_()
    change = {"0:grad": edits.zero(), "1.step": edits.scale(0.5)}
    sites = ("0:grad", "1.step#1")
    with th.capture(model, *sites, edit=change) as after:
        model(leaf).sum().backward()
    with th.capture(model, *sites, edit=change, before_edits=True) as before:
        model(leaf).sum().backward()
    assert torch.equal(after["1.step#1"], X * 0.5)
    assert torch.equal(before["1.step#1"], X)
    assert torch.equal(after["0:grad"], torch.zeros(2, 3))
    assert torch.equal(before["0:grad"], torch.full((2, 3), 1.5))
    assert [record.call for record in before.records("1.step")] == [1]


def test_before_edits_keeps_the_gradient_of_every_call() -> None:
    model = chain(Pass())
    with th.capture(model, "0:grad", edit={"0:grad": edits.zero()}, before_edits=True) as rec:
        for factor in (1.0, 2.0, 3.0):
            (model(X.clone().requires_grad_()) * factor).sum().backward()
    assert torch.equal(torch.stack(rec.all("0:grad")), torch.stack([torch.full((2, 3), k) for k in (1.0, 2.0, 3.0)]))


def test_a_user_function_that_works_in_place_is_seen_and_kept_right() -> None:
    model = chain(Pass(), Pass())

    def in_place(value: Tensor) -> Tensor:
        return value.add_(1)

    def in_place_without_return(value: Tensor) -> None:
        value.mul_(2)

    change = {"0": [in_place, in_place_without_return]}
    output, rec = th.run(model, X, capture="0", edit=change)
    assert torch.equal(output, (X + 1) * 2)
    assert torch.equal(rec["0"], (X + 1) * 2)
    _, before = th.run(model, X, capture="0", edit=change, before_edits=True)
    assert torch.equal(before["0"], X)


@pytest.mark.shows("Threads: edits")
def test_edits_of_two_threads_do_not_mix() -> None:
    model, wrong = chain(Pass(), Pass()), []

    def work(number: float) -> None:
        with th.edit(model, {"0": edits.add(number)}):
            for _ in range(50):
                if not torch.equal(model(X), X + number):
                    wrong.append(number)

    in_threads(*[functools.partial(work, float(number)) for number in range(1, 5)])
    assert not wrong
    assert torch.equal(model(X), X)


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(edit: Any, *parts: str, site: str = "0", module: nn.Module | None = None) -> None:
    model = chain(module or Pass(), nn.Identity())
    before = snapshot(model)
    with pytest.raises(EditError) as caught, th.edit(model, {site: edit}):
        model(X.clone().requires_grad_() if ":grad" in site else X)
    for part in parts:
        assert part in str(caught.value), caught.value
    assert_same(before, snapshot(model), "the model after a refused edit")


def test_a_wrong_shape_is_refused_with_expected_and_found() -> None:
    for edit in (
        lambda v: v[:1],
        lambda v: v[..., None],
        edits.replace(torch.ones(2, 4)),
        edits.add(torch.ones(4, 2, 3)),
    ):
        refused(edit, "0#0", "shape", "expected (2, 3)", "found (")
    refused(lambda v: v[:1], "1#0:input", "expected (2, 3)", "found (1, 3)", site="1:input")
    refused(lambda v: v[:1], "0/mul#0", "expected (2, 3)", "found (1, 3)", site="0/mul")


def test_a_wrong_dtype_is_refused_with_expected_and_found() -> None:
    refused(lambda v: v.double(), "0#0", "dtype", "expected torch.float32", "found torch.float64")
    for edit in (edits.add(0.7), edits.replace(0.7)):
        refused(edit, "0#0", "dtype", "expected torch.int64", "found torch.float32", module=Apply(torch.Tensor.long))


def test_a_wrong_device_is_refused_with_expected_and_found() -> None:
    refused(lambda v: v.to("meta"), "0#0", "device", "expected cpu", "found meta")


def test_a_wrong_structure_is_refused_with_expected_and_found() -> None:
    refused(lambda v: (v, v), "0#0", "structure", "expected Tensor (2, 3)", "found tuple ((2, 3), (2, 3))")
    refused(lambda v: "text", "0#0", "expected (2, 3)", "found 'text'")
    refused(lambda v: v[0], "0#0", "structure", "expected tuple ((2, 3), {", "found Tensor (2, 3)", module=Nested())
    refused(lambda v: dict(zip("01", v, strict=True)), "0#0", "expected tuple", "found dict", module=Nested())
    refused(edits.at("1.deep.0", lambda v: v[:1]), "0#0", "expected (2, 3)", "found (1, 3)", module=Nested())
    refused(edits.at("1.deep.0", lambda v: 3), "0#0", "1.deep.0", "expected (2, 3)", "found 3", module=Nested())


def test_a_leaf_that_is_not_there_is_refused_with_those_that_are() -> None:
    refused(edits.at("2", edits.zero()), "0#0", "at('2')", "'1.deep.0'", "'1.more.0'", module=Nested())
    refused(edits.at("1.0", edits.zero()), "0#0", "at('1.0')", "a bare Tensor")


def test_an_edit_of_one_tensor_says_which_there_are() -> None:
    refused(
        edits.add(1.0), "0#0", "edits.add changes one tensor", "has 3", "edits.at('0', edits.add(…))", module=Nested()
    )


def test_what_is_not_an_edit_is_refused_before_anything_runs() -> None:
    for wrong in (3.0, torch.zeros(2), "zero", None):
        with pytest.raises(EditError, match=r"is not an edit.*edits\.replace"):
            th.edit(chain(Pass()), {"0": wrong})
    with pytest.raises(EditError, match="is not an edit"):
        th.edit(chain(Pass()), {"0": [edits.zero(), 3.0]})
    with pytest.raises(TypeError, match="edits are a dict of selectors and edits, found list"):
        th.edit(chain(Pass()), [edits.zero()])
    with pytest.raises(TypeError, match=r"found edits.scale\(2\): say where"):
        th.edit(chain(Pass()), edits.scale(2))


@pytest.mark.parametrize("name", ["replace", "add", "scale", "zero", "mean", "clamp", "noise", "patch", "at"])
def test_an_edit_that_was_not_called_is_refused_before_anything_runs(name: str) -> None:
    model = chain(Pass())
    for edit in (getattr(edits, name), [edits.scale(2), getattr(edits, name)]):
        with pytest.raises(
            EditError, match=rf"^edits\.{name} makes an edit when it is called: write edits\.{name}\(…\)"
        ):
            th.edit(model, {"0": edit})
    with pytest.raises(EditError, match="makes an edit when it is called"):
        edits.at("0", getattr(edits, name))


@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        (edits.zero(), lambda i: i * 0),
        (edits.clamp(1, 2), lambda i: i.clamp(1, 2)),
        (edits.clamp(high=0), lambda i: i * 0),
    ],
    ids=["zero", "clamp", "clamp high"],
)
def test_integers_are_zeroed_and_clamped_before_an_embedding(edit: Any, by_hand: Any) -> None:
    model, ids = chain(nn.Embedding(5, 3)), torch.tensor([[0, 1, 4, 3]])
    expected = model(by_hand(ids))
    with th.edit(model, {"0:input": edit}):
        assert torch.equal(model(ids), expected)
    assert ids.tolist() == [[0, 1, 4, 3]]


@pytest.mark.parametrize("edit", [edits.scale(2), edits.mean(), edits.noise(1.0)], ids=["scale", "mean", "noise"])
def test_an_edit_that_would_leave_integers_as_they_are_is_refused(edit: Any) -> None:
    model = chain(nn.Embedding(5, 3))
    with (
        th.edit(model, {"0:input": edit}),
        pytest.raises(EditError, match=r"0.*:input: edits\.\w+ changes floating-point"),
    ):
        model(torch.tensor([1]))


def test_an_edit_of_a_value_without_tensors_is_refused() -> None:
    with pytest.raises(EditError, match=r"^fc: edits\.zero changes tensors, and this value has none: NoneType None\.$"):
        edits.zero()(None, Site("fc"))
    with pytest.raises(EditError, match=r"has none: dict \{a=\(1,\)\}, torch\.int64\.$"):
        edits.scale(2)({"a": torch.ones(1, dtype=torch.int64)}, Site("fc"))


@pytest.mark.parametrize("edit", [edits.zero(), edits.clamp(0, 0), edits.scale(0)], ids=["zero", "clamp", "scale"])
def test_integers_beside_floating_point_tensors_stay(edit: Any) -> None:
    value = (torch.ones(2), torch.tensor([1, 2]), {"mask": torch.tensor([True])})
    new = edit(value, Site("fc"))
    assert new[0].tolist() == [0, 0]
    assert new[1] is value[1]
    assert new[2]["mask"] is value[2]["mask"]


def test_an_unknown_site_is_refused_with_the_closest() -> None:
    with pytest.raises(SelectorError, match=r"'layer4'"):
        th.edit(small_resnet()[0], {"layer44": edits.zero()})


def test_an_error_in_a_users_edit_passes_through_unchanged() -> None:
    error = ZeroDivisionError("mine")

    def broken(value: Tensor) -> Tensor:
        raise error

    model = chain(Pass())
    with pytest.raises(ZeroDivisionError) as caught, th.edit(model, {"0": broken}):
        model(X)
    assert caught.value is error
    assert torch.equal(model(X), X)


@pytest.mark.parametrize("port", ["grad", "grad_input"])
def test_a_wrong_gradient_is_refused_in_the_backward_pass(port: str) -> None:
    model = chain(Pass())
    with pytest.raises(EditError, match=rf"0#0:{port}: .*shape: expected \(2, 3\), found \(1, 3\)"):
        with th.edit(model, {f"0:{port}": lambda g: g[:1]}):
            model(X.clone().requires_grad_()).sum().backward()


def test_an_edit_at_a_site_that_never_ran_is_reported() -> None:
    model = chain(Pass())
    model.add_module("spare", Pass())
    model.forward = lambda x: model[0](x)
    with pytest.warns(NeverRanWarning, match="'spare'"):
        with th.edit(model, {"spare": edits.zero()}):
            model(X)
    with pytest.warns(NeverRanWarning, match=r"'0#3': it ran 1 time, so there was no call 3"):
        with th.edit(model, {"0#3": edits.zero()}):
            model(X)


# -- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_edits_work_in_every_gradient_mode(mode: Any) -> None:
    model = chain(nn.Linear(3, 3), nn.ReLU(inplace=True))
    for edit, expected in (
        (edits.zero(), lambda y: y * 0),
        (edits.add(1.0), lambda y: y + 1),
        (edits.replace(2.0), lambda y: torch.full_like(y, 2.0)),
        (edits.mean(), lambda y: y.mean(0, keepdim=True).expand_as(y)),
        (lambda v: v.mul_(2), lambda y: y * 2),
    ):
        with mode():
            plain = model[0](X).clone()
            with th.edit(model, {"0": edit}):
                torch.testing.assert_close(model(X), expected(plain).relu())


def test_gradients_flow_through_edits() -> None:
    model, leaf = chain(Pass(), nn.ReLU(inplace=True)), X.clone().requires_grad_()
    with th.edit(model, {"0": [edits.scale(3.0), edits.add(1.0)]}):
        model(leaf).sum().backward()
    assert torch.equal(leaf.grad, 3.0 * (X * 3 + 1 > 0))


def test_a_steering_vector_can_be_trained() -> None:
    vector = torch.zeros(3, requires_grad=True)
    model = chain(Pass(), Pass())
    with th.edit(model, {"0": edits.add(vector)}):
        (model(X) * 2).sum().backward()
    assert torch.equal(vector.grad, torch.full((3,), 4.0))


@pytest.mark.shows("Precision: edits under autocast")
def test_edits_under_autocast_meet_the_dtype_that_passes() -> None:
    model = chain(nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with th.capture(model, "0", edit={"0": [edits.add(torch.ones(3)), edits.scale(0.0), edits.add(1.0)]}) as rec:
            output = model(X)
    assert rec["0"].dtype == torch.bfloat16
    assert torch.equal(rec["0"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.block = chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.block(y) if self.reentrant is None else checkpoint(self.block, y, use_reentrant=self.reentrant)


@pytest.mark.shows("Checkpointing: edits")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("site", ["block.0", "block.2:input", "block.1/tanh", "block.0#0", "block.3:grad"])
def test_edits_are_made_again_when_a_checkpointed_block_is_recomputed(reentrant: bool, site: str) -> None:
    grads = []
    for kind in (None, reentrant):
        model = Checkpointed(kind)
        with th.edit(model, {site: [edits.scale(3.0), edits.add(0.5)]}):
            model(X).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1])


# -- nothing is left behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, "in the model", "in the edit"])
def test_nothing_is_left_behind_on_every_way_out(error: Any) -> None:
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    before, plain = snapshot(model), model(X)
    raised = {"in the model": RuntimeError, "in the edit": OSError}.get(error, error)

    def broken(value: Tensor) -> None:
        if error == "in the edit":
            raise OSError

    change = {
        "0": [edits.noise(1.0), broken],
        "1:input": edits.scale(2.0),
        "2/linear": edits.scale(2.0),
        "2/linear:input": edits.at("args.0", edits.scale(2.0)),
        "0:grad": edits.zero(),
        "2.weight:grad": edits.zero(),
    }
    with pytest.raises(raised) if raised else contextlib.nullcontext(), th.edit(model, change):
        leaf = X.clone().requires_grad_()
        y = model(X[:, :1] if error == "in the model" else leaf)
        torch.autograd.grad(y.sum(), [leaf, *model.parameters()], allow_unused=True)
        if raised:
            raise raised
    assert_same(before, snapshot(model), "the model and the process")
    assert torch.equal(model(X), plain)


# -- laws ---------------------------------------------------------------------------------------------------------

numbers = st.integers(-8, 8).map(float)
simple = st.one_of(
    numbers.map(lambda a: (edits.add(a), lambda v: v + a)),
    numbers.map(lambda a: (edits.scale(a), lambda v: v * a)),
    numbers.map(lambda a: (edits.clamp(a, a + 3), lambda v: v.clip(a, a + 3))),
    st.just((edits.zero(), lambda v: v * 0)),
    numbers.map(lambda a: (edits.replace(a), lambda v: v * 0 + a)),
)
sites = st.sampled_from(["0", "1:input", "0/mul", "1/mul:input"])


@settings(max_examples=60, deadline=None)
@given(a=numbers, b=numbers, site=st.sampled_from(["0", "1:input", "0/mul"]))
def test_scaling_twice_is_scaling_by_the_product_and_adding_twice_by_the_sum(a: float, b: float, site: str) -> None:
    assert torch.equal(edited([edits.scale(a), edits.scale(b)], site=site), X * (a * b))
    assert torch.equal(edited([edits.add(a), edits.add(b)], site=site), X + (a + b))
    assert torch.equal(edited([edits.add(a), edits.add(-a)], site=site), X)
    assert torch.equal(edited([edits.clamp(-1, 2), edits.clamp(-1, 2)], site=site), X.clip(-1, 2))
    assert torch.equal(edited([edits.add(a), edits.zero()], site=site), torch.zeros(2, 3))
    assert torch.equal(edited([edits.scale(b), edits.replace(a)], site=site), torch.full((2, 3), a))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(simple, sites), max_size=6), nested=st.booleans())
def test_any_edits_at_any_sites_compose_as_plain_functions_do(steps: list[Any], nested: bool) -> None:
    order = ["0/mul", "0", "1:input", "1/mul:input"]
    expected = X
    for site in order:
        for (_, by_hand), where in steps:
            if where == site:
                expected = by_hand(expected)
    model = chain(Pass(), Pass())

    def change(edit: Any, site: str) -> dict[str, Any]:
        return {site: edits.at("args.0", edit) if site.endswith("mul:input") else edit}

    with contextlib.ExitStack() as stack:
        if nested:
            for (edit, _), site in steps:
                stack.enter_context(th.edit(model, change(edit, site)))
        else:
            session = Session(model)
            for (edit, _), site in steps:
                for selector, one in change(edit, site).items():
                    for target in resolve(session.index, selector):
                        session.edit(target, one)
            stack.enter_context(session)
        found = model(X)
    assert torch.equal(found, expected)
    assert torch.equal(model(X), X)
