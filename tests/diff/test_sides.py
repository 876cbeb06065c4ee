"""What a side may be: arrays of another program, files of them, recordings beside a model, exported programs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import Tensor, nn

from tests.diff.nets import Net, image, net
from tests.oracle import run_with_jax
from torchhook._capture import capture
from torchhook._diff.api import diff
from torchhook._diff.sides import runnable
from torchhook.errors import MissingRecordError, RecordingFileError, TorchVersionError


def two_layers() -> nn.Sequential:
    """Weights that can be worked out by hand: the first doubles, the second adds up."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 1.0]]))
    return model


X = torch.tensor([[1.0, 3.0]])
# 2 * (1, 3) = (2, 6), and 2 + 6 = 8.
RIGHT = {"0": np.array([[2.0, 6.0]]), "1": np.array([[8.0]])}


def test_a_model_is_compared_with_arrays_worked_out_by_hand() -> None:
    assert diff(two_layers(), RIGHT, X).ok
    result = diff(two_layers(), {"0": RIGHT["0"], "1": np.array([[8.5]])}, X)
    assert [(row.site, row.status, row.max_abs) for row in result] == [("0", "same", 0.0), ("1", "differs", 0.5)]
    assert result["1"].sqnr == pytest.approx(20 * np.log10(16))


def test_arrays_are_the_reference_for_a_model() -> None:
    result = diff({"0": np.array([[2.0, 5.0]]), "1": RIGHT["1"]}, two_layers(), X)
    assert [(row.site, row.status) for row in result] == [("0", "differs"), ("1", "same")]
    assert result["0"].max_abs == 1.0
    result = diff({**RIGHT, "2": np.zeros(1)}, two_layers(), X)
    assert (result["2"].status, result.ok) == ("only in A", False)


def test_the_arrays_say_which_sites_are_compared() -> None:
    result = diff(two_layers(), {"1": RIGHT["1"], "probability": np.zeros(1)}, X)
    assert [(row.site, row.status) for row in result] == [("1", "same"), ("probability", "only in B")]
    assert result.ok
    assert diff(two_layers(), RIGHT, X, sites="1").rows[0].site == "1"
    assert [row.site for row in diff(two_layers(), RIGHT, X, exclude="0")] == ["1"]


def test_names_lead_to_what_another_program_calls_its_outputs() -> None:
    other = {"/0/MatMul_output_0": RIGHT["0"], "logits:0": RIGHT["1"]}
    result = diff(two_layers(), other, X, names={"0": "/0/MatMul_output_0", "1": "logits:0"})
    assert [(row.other, row.status) for row in result] == [("/0/MatMul_output_0", "same"), ("logits:0", "same")]
    back = diff(other, two_layers(), X, names={"/0/MatMul_output_0": "0", "logits:0": "1"})
    assert back.ok
    assert diff(two_layers(), {"out": RIGHT["1"]}, X, names={"(model)": "out"}).ok


def test_arrays_address_inputs_operations_and_calls() -> None:
    model = net()
    with capture(model, "fc:input", "/mean", "relu", "conv") as rec:
        model(image())
    values = {name: np.asarray(value) for name, value in rec.items()}
    assert list(values) == ["conv", "relu#0", "relu#1", "/mean", "fc:input"]
    result = diff(model, values, image(), rtol=0, atol=0)
    assert sorted(row.site for row in result if row.status == "same") == sorted(values)
    values["relu#1"] = values["relu#1"] + 1
    first = diff(values, model, image()).first
    assert first is not None
    assert first.site == "relu#1"


def test_a_recording_is_compared_with_a_model() -> None:
    model, port = net(), net()
    with capture(model, "conv", "conv2", "fc") as rec:
        model(image())
    assert diff(rec, model, image(), rtol=0, atol=0).ok
    assert diff(model, rec, image(), rtol=0, atol=0).ok
    with torch.no_grad():
        port.conv2.bias += 1  # type: ignore[operator]
    first = diff(rec, port, image()).first
    assert first is not None
    assert first.site == "conv2"


@pytest.mark.parametrize("kind", ["npz", "safetensors", "recording"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_side_is_a_file(tmp_path: Path, kind: str, as_text: bool) -> None:
    model, path = two_layers(), tmp_path / ("a.npz" if kind == "npz" else "a.safetensors")
    if kind == "npz":
        np.savez(path, **RIGHT)
    elif kind == "safetensors":
        safetensors.numpy.save_file(RIGHT, path)
    else:
        with capture(model, "0", "1") as rec:
            model(X)
        rec.save(path)
    side: Any = str(path) if as_text else path
    assert diff(model, side, X).ok
    assert diff(side, model, X).ok
    assert diff(side, side).ok
    assert diff(side, RIGHT).ok
    assert not diff(RIGHT, {**RIGHT, "1": np.zeros((1, 1))}).ok


def test_arrays_and_recordings_are_compared_without_a_model() -> None:
    model = net()
    with capture(model, "relu", "fc") as rec:
        model(image())
    values = {name: np.asarray(value) for name, value in rec.items()}
    assert diff(rec, values, rtol=0, atol=0).ok
    assert diff(values, rec, rtol=0, atol=0).ok


def test_names_that_nothing_has_are_refused_with_the_way_out() -> None:
    with pytest.raises(MissingRecordError, match=r"none of B's names is a site of A: 'conv_2'.* names="):
        diff(net(), {"conv_2": np.zeros(1)}, image())
    with pytest.raises(MissingRecordError, match=r"B has no site 'conv_2'\. .*names=.* Closest: 'conv2'"):
        diff({"conv_2": np.zeros(1)}, net(), image())
    with pytest.raises(MissingRecordError, match="arrays: there is none to compare"):
        diff(net(), {}, image(), sites="fc")


# -- exported programs ----------------------------------------------------------------------------------------


def exported(model: nn.Module, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        return torch.export.export(model, args, strict=False)


def saved(program: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path)
    return path


@pytest.mark.shows("Exported: diff with a .pt2")
def test_a_program_is_compared_layer_by_layer(tmp_path: Path) -> None:
    model = net()
    program = exported(model, image())
    for side in (program, saved(program, tmp_path / "net.pt2")):
        for result in (diff(model, side, image()), diff(side, model, image())):
            assert result.ok, result
            assert [row.site for row in result] == ["conv", "bn", "relu#0", "conv2", "relu#1", "drop", "fc", ""]
            assert "training mode" not in str(result)


def test_the_changed_layer_of_a_program_is_named(tmp_path: Path) -> None:
    model, port = net(), net()
    with torch.no_grad():
        port.conv2.bias += 0.5  # type: ignore[operator]
    result = diff(model, saved(exported(port, image()), tmp_path / "port.pt2"), image())
    assert result.first is not None
    assert result.first.site == "conv2"
    assert result.first.max_abs == pytest.approx(0.5, abs=1e-5)


def test_calls_of_one_module_stay_one_site_where_the_program_has_a_copy_for_each() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return x * by

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.scaled(x, 2.0), 3.0)

    program = exported(Twice(), X)
    assert {"scaled", "scaled@1"} <= {name for name, _ in runnable(program, "B").named_modules()}
    result = diff(Twice(), program, X)
    assert [(row.site, row.status) for row in result] == [("scaled#0", "same"), ("scaled#1", "same"), ("", "same")]


class PassesOn(nn.Module):
    """Layers without an operation of their own, among others; one of them computes from its second call on."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return x if by == 1 else x * by

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(2, 2), act, nn.Dropout(0.5)
        self.empty, self.scaled = nn.Sequential(nn.Identity()), self.Scaled()

    def forward(self, x: Tensor) -> Tensor:
        x = self.empty(self.act(self.fc(x)))
        return self.drop(self.scaled(self.scaled(x, 1.0), 3.0))


@pytest.mark.parametrize("local", [False, True])
def test_layers_that_pass_on_what_they_get_are_no_difference_to_a_program(local: bool) -> None:
    model = PassesOn(nn.Identity()).eval()
    result = diff(model, exported(model, X), X, local=local)
    assert result.ok, result
    assert result.first is None
    left_out = ["act", "empty.0", "empty", "scaled#0"]
    assert [row.site for row in result.missing] == [row.site for row in result if row.status == "left out"] == left_out
    assert "all the same; 4 left out" in str(result)
    assert (result["scaled#1"].status, result["scaled#1"].max_abs) == ("same", 0.0)
    assert diff(exported(model, X), model, X).ok


def test_a_layer_that_a_program_lacks_and_that_computes_is_a_difference() -> None:
    model, port = PassesOn(nn.ReLU(inplace=True)).eval(), PassesOn(nn.Identity()).eval()
    with torch.no_grad():
        model.fc.bias.fill_(-100.0)  # what is passed on is below zero: the ReLU changes it
    port.load_state_dict(model.state_dict())
    result = diff(model, exported(port, X), X)
    assert (result["act"].status, result["empty"].status, result.ok) == ("only in A", "left out", False)
    with torch.no_grad():
        port.fc.bias += 1.0
    first = diff(port, exported(PassesOn(nn.Identity()).eval(), X), X).first
    assert first is not None
    assert first.site == "fc"


def test_a_program_is_compared_with_arrays() -> None:
    assert diff(exported(two_layers(), X), RIGHT, X).ok
    assert not diff(RIGHT, exported(two_layers(), X), X + 1).ok


def test_a_program_that_torch_cannot_take_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(program: Any) -> Any:
        raise RuntimeError("Child module 'a' is not a descendant")

    monkeypatch.setattr(torch.export, "unflatten", lost)
    with pytest.raises(TorchVersionError, match=r"cannot make layers .* \(Child module 'a' .*strict=False"):
        diff(two_layers(), exported(two_layers(), X), X)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt2"):
        diff(net(), tmp_path / "none.pt2", image())
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    with pytest.raises(RecordingFileError, match=r"bad\.pt2 is no program that torch\.export\.save wrote"):
        diff(net(), tmp_path / "bad.pt2", image())


# -- other frameworks ---------------------------------------------------------------------------------------------


@pytest.mark.shows("Exported: diff with ONNX Runtime")
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 cannot export batch norm to ONNX with this onnxscript"
)
def test_onnx_runtime_agrees_with_the_model_that_was_exported(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("onnxscript", reason="torch's ONNX exporter needs onnxscript")
    model, path = net(), str(tmp_path / "net.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (image(),), path, output_names=["logits"], dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    outputs = session.run(None, {session.get_inputs()[0].name: image().numpy()})
    values = dict(zip([output.name for output in session.get_outputs()], outputs, strict=True))
    assert diff(model, values, image(), names={"(model)": "logits"}).ok
    values["logits"] = values["logits"] + 0.1
    assert not diff(model, values, image(), names={"(model)": "logits"}).ok


@pytest.mark.shows("Data: diff with JAX")
def test_jax_agrees_with_a_layer_worked_out_there() -> None:
    run_with_jax("""
        import jax, torch, torchhook as th
        model, x = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.ReLU()), torch.randn(2, 3)
        hidden = jax.numpy.array(x.numpy()) @ jax.numpy.array(model[0].weight.detach().numpy()).T
        assert th.diff(model, {"0": hidden}, x).ok
        assert not th.diff(model, {"0": hidden + 1}, x).ok
    """)


def test_a_models_process_is_left_as_it_was_beside_arrays() -> None:
    model: Any = Net().train()
    before = model.bn.running_mean.clone()
    state = torch.get_rng_state()
    diff(model, {"fc": np.zeros((2, 2))}, image())
    assert torch.equal(before, model.bn.running_mean)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
