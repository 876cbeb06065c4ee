"""``capture`` and ``run``: the front doors, against bare hooks with clones."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests.oracle import hooks_on
from torchhook.errors import NeverRanWarning, SelectorError
from torchhook.types import Site, Stopped


class Net(nn.Module):
    """In-place layers, a skip connection, a module that is called twice, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.relu(self.conv1(x))
        z = self.bn(self.conv2(y))
        z += y
        z = self.relu(z)
        return self.fc(F.relu(z.mean((2, 3)))) * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1))


def oracle(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """The model's output, and every module's outputs and inputs as bare cloning hooks see them."""
    outputs: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            inputs.setdefault(name, []).append(args[0].clone())

        def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            outputs.setdefault(name, []).append(output.clone())

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        return model(*args, **kwargs), outputs, inputs
    finally:
        for handle in handles:
            handle.remove()


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("keep", ["copy", "live"])
def test_every_value_is_what_a_cloning_hook_saw(net: Net, x: Tensor, grad_mode: Any, keep: str) -> None:
    with grad_mode():
        output, outputs, inputs = oracle(net, x)
        with th.capture(net, nn.Module, Site("", port="input"), "**:input", keep=keep) as rec:
            assert torch.equal(net(x), output)
    for name, _ in net.named_modules():
        assert equal(rec.all(name), outputs[name])
        assert equal(rec.all(f"{name}:input"), inputs[name])


def test_without_selectors_every_module_is_captured(net: Net, x: Tensor) -> None:
    with th.capture(net) as rec:
        net(x)
    assert set(rec.keys()) == {name for name, _ in net.named_modules()}
    assert torch.equal(rec[""], oracle(net, x)[0])


def test_the_recording_fills_as_the_model_runs(net: Net, x: Tensor) -> None:
    with th.capture(net, "fc") as rec:
        assert len(rec) == 0
        net(x)
        assert rec["fc"].shape == (2, 3)
        net(x)
        assert len(rec.all("fc")) == 2


def test_nothing_is_recorded_after_the_block(net: Net, x: Tensor) -> None:
    with th.capture(net, "fc") as rec:
        net(x)
    net(x)
    assert len(rec.all("fc")) == 1
    assert not hooks_on(net)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"exclude": "conv*"}, ["relu", "bn", "fc"]),
        ({"port": "input"}, ["conv1:input", "relu:input", "conv2:input", "bn:input", "fc:input"]),
        ({"port": "input", "exclude": [nn.Conv2d, "relu"]}, ["bn:input", "fc:input"]),
    ],
)
def test_exclude_and_port_are_passed_on(net: Net, x: Tensor, options: dict[str, Any], keys: list[str]) -> None:
    with th.capture(net, "*", **options) as rec:
        net(x)
    assert rec.keys() == keys


def test_dtype_device_transform_and_max_records_are_passed_on(net: Net, x: Tensor) -> None:
    with th.capture(
        net, "relu", dtype=torch.float64, device="cpu", transform=lambda t: t.mean((2, 3)), max_records=1
    ) as rec:
        net(x)
    _, outputs, _ = oracle(net, x)
    assert torch.equal(rec["relu"], outputs["relu"][1].mean((2, 3)).double())
    assert rec.records("relu")[0].call == 1


def test_live_values_carry_gradients_and_references_are_the_models_own(net: Net, x: Tensor) -> None:
    with th.capture(net, "conv1", keep="live") as rec:
        net(x)
    (grad,) = torch.autograd.grad(rec["conv1"].sum(), net.conv1.bias)
    assert grad.tolist() == [50.0] * 4
    with th.capture(net, "", keep="reference") as rec:
        output = net(x)
    assert rec[""] is output


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": "deep"}, ValueError, "keep='deep'"),
        ({"dtype": "half"}, TypeError, "dtype must be a torch.dtype"),
        ({"transform": "mean"}, TypeError, "transform must be callable"),
        ({"max_records": 0}, ValueError, "max_records=0"),
        ({"threads": "some"}, ValueError, "threads='some'"),
        ({"port": "out"}, SelectorError, "port='out'"),
        ({"exclude": "*"}, SelectorError, "leaves no site"),
    ],
)
def test_wrong_options_are_refused_before_any_hook_is_there(net: Net, options, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        th.capture(net, "fc", **options)
    assert not hooks_on(net)


def test_a_wrong_name_raises_at_the_door(net: Net) -> None:
    with pytest.raises(SelectorError, match=r"^no layer 'conv3' in the model\. Closest: 'conv2', 'conv1'\.$"):
        th.capture(net, "conv3")
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, found function"):
        th.capture(lambda: None, "conv3")  # type: ignore[arg-type]


def test_one_call_of_a_site_can_be_chosen(net: Net, x: Tensor) -> None:
    _, outputs, _ = oracle(net, x)
    with th.capture(net, "relu#1") as rec:
        net(x)
    assert torch.equal(rec["relu#1"], outputs["relu"][1])
    assert torch.equal(rec["relu"], outputs["relu"][1])
    assert len(rec.all("relu")) == 1


# -- stop ------------------------------------------------------------------------------------------


def test_stop_leaves_the_block_when_every_site_was_seen(net: Net, x: Tensor) -> None:
    reached = False
    with th.capture(net, "conv1", "bn", stop=True) as rec:
        net(x)
        reached = True
    assert not reached
    assert rec.keys() == ["conv1", "bn"]
    assert torch.equal(rec["bn"], oracle(net, x)[1]["bn"][0])


def test_stop_waits_for_the_call_that_was_asked_for(net: Net, x: Tensor) -> None:
    with th.capture(net, "relu#1", stop=True) as rec:
        net(x)
    assert rec.records("relu")[0].call == 1


class Stubborn(nn.Module):
    """Catches what it can, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.ReLU(), nn.ReLU()
        self.went_on = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.layer(x)
        except Exception:
            self.went_on = True
        self.went_on = True
        return self.after(x)


def test_stop_survives_a_model_that_catches_exceptions(x: Tensor) -> None:
    model = Stubborn()
    with th.capture(model, "layer", stop=True) as rec:
        model(x)
    assert rec.keys() == ["layer"]
    assert not model.went_on


def test_an_inner_stop_does_not_end_the_outer_block(net: Net, x: Tensor) -> None:
    with th.capture(net, "fc") as outer:
        with th.capture(net, "conv1", stop=True) as inner:
            net(x)
        net(x)
    assert inner.keys() == ["conv1"]
    assert len(outer.all("fc")) == 1


def test_a_stop_that_is_never_reached_lets_the_model_finish_and_says_what_never_ran(x: Tensor) -> None:
    model = Stubborn()
    model.aside = nn.ReLU()
    with pytest.warns(NeverRanWarning, match="'aside'"):
        output, rec = th.run(model, x, capture=["layer", "aside"], stop=True)
    assert torch.equal(output, x.relu())
    assert rec.keys() == ["layer"]


# -- run -------------------------------------------------------------------------------------------


def test_run_returns_the_output_and_the_recording(net: Net, x: Tensor) -> None:
    expected, outputs, _ = oracle(net, x)
    output, rec = th.run(net, x, capture=["conv*", "relu"])
    assert torch.equal(output, expected)
    assert rec.keys() == ["conv1", "relu", "conv2"]
    assert equal(rec.all("relu"), outputs["relu"])


def test_run_without_capture_records_every_module(net: Net, x: Tensor) -> None:
    _, rec = th.run(net, x)
    assert set(rec.keys()) == {name for name, _ in net.named_modules()}


def test_run_with_an_edit_alone_records_nothing(net: Net, x: Tensor) -> None:
    output, rec = th.run(net, x, edit={"fc": th.edits.zero()})
    assert torch.equal(output, torch.zeros(2, 3))
    assert rec.keys() == []
    assert rec.missing == {}


def test_run_hands_other_keywords_to_the_model(net: Net, x: Tensor) -> None:
    expected = net(x, scale=3.0)
    assert torch.equal(th.run(net, x, capture="fc", scale=3.0)[0], expected)
    assert torch.equal(th.run(net, capture="fc", scale=3.0, kwargs={"x": x})[0], expected)


def test_run_hands_on_keywords_whose_names_are_taken() -> None:
    class Takes(nn.Module):
        def forward(self, capture: int, keep: int = 0, model: int = 0) -> tuple[int, int, int]:
            return capture, keep, model

    output, rec = th.run(Takes(), capture="", kwargs={"capture": 1, "keep": 2, "model": 3})
    assert output == (1, 2, 3)
    assert rec[""] == (1, 2, 3)


def test_run_takes_the_options_of_capture(net: Net, x: Tensor) -> None:
    _, rec = th.run(net, x, capture="*", exclude="conv*", port="input", dtype=torch.float16, transform=lambda t: t * 2)
    assert rec.keys() == ["relu:input", "bn:input", "fc:input"]
    assert rec["bn:input"].dtype == torch.float16
    _, _, inputs = oracle(net, x)
    assert torch.equal(rec["bn:input"], (inputs["bn"][0] * 2).half())
    output, rec = th.run(net, x, capture="", keep="reference")
    assert rec[""] is output


def test_run_with_stop_has_a_stand_in_for_the_output(net: Net, x: Tensor) -> None:
    output, rec = th.run(net, x, capture=["conv1", "bn"], stop=True)
    assert isinstance(output, Stopped)
    assert output.at == "bn"
    assert repr(output) == "<no output: the forward pass stopped at 'bn'>"
    assert rec.keys() == ["conv1", "bn"]
    with pytest.raises(AttributeError) as caught:
        output.shape
    assert str(caught.value) == "no 'shape': the forward pass stopped at 'bn', so the model has no output."


def test_an_error_of_the_model_passes_through_unchanged_and_leaves_nothing(net: Net, x: Tensor) -> None:
    error = RuntimeError("mine")

    def fail(t: Tensor) -> Tensor:
        raise error

    net.bn.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        th.run(net, x, capture="*")
    assert caught.value is error
    with pytest.raises(RuntimeError) as caught, th.capture(net, "*") as rec:
        net(x)
    assert caught.value is error
    assert rec.keys() == ["conv1", "relu", "conv2"]
    assert rec.missing["fc"] == "the block ended early with RuntimeError."
    assert not hooks_on(net)


def test_an_error_of_the_transform_passes_through_and_leaves_nothing(net: Net, x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        th.run(net, x, capture="conv1", transform=lambda t: 1 / 0)
    assert not hooks_on(net)


def test_the_signature_of_capture_has_the_names_of_the_contract() -> None:
    names = set(inspect.signature(th.capture).parameters)
    assert names >= {"keep", "device", "dtype", "transform", "max_records", "stop", "exclude", "threads"}
    assert set(inspect.signature(th.run).parameters) >= {"capture", "stop", "keep", "device", "dtype", "transform"}


class TakesAny(nn.Linear):
    """As models of transformers do."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.got = kwargs
        return super().forward(x)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("edits", "edit={site: edit}"),
        ("captures", "capture=…"),
        ("sites", "capture=…"),
        ("selectors", "capture=…"),
        ("transforms", "transform=…"),
        ("max_records", "th.capture(model, …, max_records=…).run(…)"),
        ("threads", "th.capture(model, …, threads=…).run(…)"),
        ("gather", "th.capture(model, …, gather=…).run(…)"),
    ],
)
def test_run_refuses_a_keyword_that_is_nearly_one_of_its_own_and_no_other(name: str, instead: str) -> None:
    model, one = TakesAny(2, 2), torch.ones(1, 2)
    for given in (model, nn.DataParallel(model)):
        with pytest.raises(
            TypeError, match=re.escape(f"th.run has no {name}=") + ".*" + re.escape(f"write {instead}.")
        ):
            th.run(given, one, **{name: {"(model)": th.edits.zero()}})
    th.run(model, one, kwargs={name: 1})
    assert model.got == {name: 1}
    th.run(model, one, use_cache=True)
    assert model.got == {"use_cache": True}


def test_run_passes_a_keyword_that_the_model_names_itself() -> None:
    class Drawn(nn.Module):
        def forward(self, x: Tensor, sites: int, **kwargs: Any) -> Tensor:
            return x * sites

    for model in (Drawn(), torch.compile(Drawn(), backend="eager")):
        assert th.run(model, torch.ones(1), edit={}, sites=3)[0].item() == 3  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="Python 3.11 has notes")
def test_run_says_how_to_give_keywords_where_the_model_takes_no_dict() -> None:
    batch = {"input": torch.ones(2, dtype=torch.long)}
    with pytest.raises(TypeError) as caught:
        th.run(nn.Embedding(3, 2), batch, capture="(model)")
    assert "th.run(model, **batch)" in caught.value.__notes__[0]  # type: ignore[attr-defined]
    assert th.run(nn.Embedding(3, 2), **batch, capture="(model)")[0].shape == (2, 2)
    with pytest.raises(TypeError) as caught:
        th.run(nn.Embedding(3, 2), {"x": 1}, capture="(model)")
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8])
def test_values_are_not_cast_to_what_has_no_fractions(net: Net, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype}: .*Use a floating-point dtype, or transform="):
        th.capture(net, dtype=dtype)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
def test_a_site_that_is_given_as_an_input_is_told_how_to_choose_it(net: Net, x: Tensor) -> None:
    name = next(name for name, _ in net.named_children())
    with pytest.raises(Exception) as raised:  # noqa: PT011 (the model's own)
        th.run(net, name, x)
    assert f"sites are named by capture={name!r}" in "".join(traceback.format_exception_only(raised.value))


def test_a_name_where_the_model_belongs_says_what_comes_first() -> None:
    with pytest.raises(TypeError, match=r"the model comes first: expected a torch\.nn\.Module, found str"):
        th.capture("layer1")  # type: ignore[arg-type]
