"""Exported programs: they load and run where this library is not installed, under the names of the sites."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import torchhook as th
from tests.classic.toys import TORCH
from torchhook import edits, transforms
from torchhook.errors import MissingExtraError, NeverRanWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own making


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.act(self.fc(x))
        return {"sum": y + x, "top": y.amax(1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        parts = self.block(x)
        out = self.head(parts["sum"] if scale is None else parts["sum"] * scale)
        return out, parts["top"]


@pytest.fixture
def net() -> Net:
    return Net().eval()


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
SITES = ["block.fc", "block", "head:input", "block/amax"]


def bare(net: Net, x: Tensor) -> dict[str, Any]:
    """What the program has to return, by hand."""
    y = x @ net.block.fc.weight.T + net.block.fc.bias
    block = {"sum": y.relu() + x, "top": y.relu().amax(1)}
    return {"block.fc": y, "block": block, "head:input": block["sum"], "block/amax": block["top"]}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected)
    assert type(found) is type(expected)


CHILD = """
    import sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("torchhook", "transformers"):
                raise ImportError(name)

    sys.meta_path.insert(0, Refuse())
    import torch
    for folder in sys.argv[1:]:
        program = torch.export.load(folder + "/program.pt2")
        x = torch.load(folder + "/x.pt")
        torch.save(program.module()(**x) if isinstance(x, dict) else program.module()(x), folder + "/result.pt")
    assert not [name for name in sys.modules if name.startswith("torchhook")]
"""


def in_a_fresh_process(programs: dict[str, tuple[Any, Any]], folder: Path) -> dict[str, Any]:
    """What saved programs give where neither torchhook nor transformers can be imported."""
    for name, (program, x) in programs.items():
        (folder / name).mkdir()
        torch.export.save(program, folder / name / "program.pt2")
        torch.save(x, folder / name / "x.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILD), *(str(folder / name) for name in programs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: torch.load(folder / name / "result.pt") for name in programs}


def tiny_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 32, (1, 6))}


@pytest.mark.shows("Exported: programs load where TorchHook is not installed")
@pytest.mark.slow
def test_programs_load_and_run_in_a_process_without_torchhook(net: Net, tmp_path: Path) -> None:
    whole, added = (bare(net, X), net(X)), {"block.fc": edits.add(torch.ones(4))}
    values, indices = (bare(net, X)["block.fc"] + 1).topk(2)
    gpt, ids = tiny_gpt()
    mlp = "transformer.h.0.mlp"
    seen: list[Tensor] = []
    with torch.no_grad():
        handle = gpt.get_submodule(mlp).register_forward_hook(lambda m, a, out: seen.append(out.clone()))
        logits = gpt(**ids).logits
        handle.remove()
    uncached = th.FeatureLayers(gpt.requires_grad_(False), [mlp], attach=True, caches=False)
    cases: dict[str, tuple[nn.Module, Any, bool, Any]] = {
        "session": (th.FeatureLayers(net, SITES), X, False, whole),
        "attached": (th.FeatureLayers(net, SITES, attach=True), X, False, whole),
        "strict": (th.FeatureLayers(net, SITES, attach=True), X, True, whole),
        "one": (th.FeatureLayer(net, "block", attach=True), X, False, (whole[0]["block"], whole[1])),
        "stopped": (th.FeatureExtractor(net, SITES, attach=True, stop=True), X, False, whole[0]),
        "changed": (
            th.FeatureExtractor(net, ["block.fc"], attach=True, edit=added, transform=transforms.topk(2)),
            X,
            False,
            {"block.fc": {"values": values, "indices": indices}},
        ),
        "uncached": (uncached, ids, False, ({mlp: seen[0]}, {"logits": logits})),
    }
    programs = {}
    for name, (hooked, x, strict, expected) in cases.items():
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        programs[name] = torch.export.export(hooked, args, kwargs, strict=strict), x
        if not isinstance(hooked, th.FeatureLayers):
            close(hooked(X), expected)
    found = in_a_fresh_process(programs, tmp_path)
    for name, (*_, expected) in cases.items():
        close(found[name], expected)


@pytest.mark.parametrize("strict", [False, True])
def test_what_an_edit_asks_of_dtypes_is_no_part_of_a_program(net: Net, strict: bool) -> None:
    """torch 2.6 cannot load a program with such a part."""
    hooked = th.FeatureExtractor(net, ["head"], attach=True, edit={"block.fc": edits.add(torch.ones(4))})
    program = torch.export.export(hooked, (X,), strict=strict)
    assert "can_cast" not in str(program.graph)
    close(program.module()(X)["head"], hooked(X)["head"])


@pytest.mark.shows("Exported: caches left out of the outputs")
def test_caches_are_left_out_on_request() -> None:
    model, x = tiny_gpt()
    assert "past_key_values" in th.FeatureLayers(model, ["transformer.h.0"], attach=True)(**x)[1]
    for attach in (False, True):
        _, output = th.FeatureLayers(model, ["transformer.h.0"], attach=attach, caches=False)(**x)
        assert list(output) == ["logits"]
        close(output["logits"], model(**x).logits)


def test_values_of_calls_with_keywords_are_plain_too(net: Net) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            return self.net(x, scale=x[:1])

    hooked = th.FeatureExtractor(Calls(), ["net:input"], attach=True)
    program = torch.export.export(hooked, (X,), strict=False)
    assert program.module()(X)["net:input"].keys() == {"args", "kwargs"}
    close(program.module()(X)["net:input"]["kwargs"]["scale"], X[:1])


# -- dynamic shapes -------------------------------------------------------------------------------------------


BATCH = Dim("batch", min=2, max=64)
named = pytest.mark.skipif(TORCH < (2, 9), reason="this version's export calls no forward with other names")


@pytest.mark.shows("Exported: dynamic shapes")
@named
@pytest.mark.parametrize("shapes", [({0: BATCH},), {"x": {0: BATCH}}], ids=["by place", "by name"])
@pytest.mark.parametrize("strict", [False, True])
def test_dynamic_shapes_are_named_as_the_models_own_arguments(net: Net, shapes: Any, strict: bool) -> None:
    hooked = th.FeatureLayers(net, ["block.fc"], attach=True)
    program = torch.export.export(hooked, (X,), dynamic_shapes=shapes, strict=strict)
    x = torch.randn(7, 4)
    features, output = program.module()(x)
    close(features["block.fc"], bare(net, x)["block.fc"])
    close(output, net(x))


@named
def test_dynamic_shapes_of_keyword_arguments(net: Net) -> None:
    hooked = th.FeatureLayers(net, ["block.fc"], attach=True)
    shapes = {"x": {0: BATCH}, "scale": None}
    program = torch.export.export(hooked, (X,), {"scale": torch.ones(4)}, dynamic_shapes=shapes)
    x, scale = torch.randn(5, 4), torch.rand(4)
    close(program.module()(x, scale=scale)[1], net(x, scale))


def test_a_wrapper_and_a_users_own_forward(net: Net) -> None:
    class Mine(th.FeatureLayers):
        def forward(self, x: Tensor) -> Any:
            """With the features alone, doubled."""
            features, _ = super().forward(x)
            return features["block.fc"] * 2

    close(Mine(net, ["block.fc"], attach=True)(X), bare(net, X)["block.fc"] * 2)
    program = torch.export.export(
        Mine(net, ["block.fc"], attach=True), (X,), dynamic_shapes=({0: BATCH},), strict=False
    )
    close(program.module()(X), bare(net, X)["block.fc"] * 2)


# -- ONNX ------------------------------------------------------------------------------------------------------------

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnxscript", "onnxruntime")),
    reason="needs onnxscript and onnxruntime",
)


@pytest.mark.shows("Exported: ONNX, with the names of the sites")
@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("shapes", [({0: BATCH},), {"x": {0: BATCH}}], ids=["by place", "by name"])
def test_onnx_outputs_are_called_as_the_sites_and_onnx_runtime_agrees(net: Net, tmp_path: Path, shapes: Any) -> None:
    import onnxruntime

    file = tmp_path / "net.onnx"
    hooked = th.FeatureLayers(net, SITES, attach=True)
    hooked.to_onnx(X, file, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert names == ["block.fc", "block.sum", "block.top", "head:input", "block/amax", "output.0", "output.1"]
    x = torch.randn(5, 4)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    wanted = bare(net, x)
    parts = [wanted["block.fc"], *wanted["block"].values(), wanted["head:input"], wanted["block/amax"], *net(x)]
    for one, other in zip(found, parts, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-4, atol=1e-5)


@needs_onnx
@pytest.mark.slow
def test_dynamic_shapes_of_keyword_arguments_are_those_of_an_onnx_file(net: Net) -> None:
    inputs = {"scale": torch.ones(4), "x": X}
    for shapes in (({0: BATCH}, None), {"scale": None, "x": {0: BATCH}}):
        program = th.FeatureExtractor(net, ["head"], attach=True).to_onnx(inputs, dynamic_shapes=shapes)
        batch = [isinstance(given.shape[0], int) for given in program.model.graph.inputs]
        assert sorted(batch) == [False, True]  # of x any number, of scale the four
    with pytest.raises(Exception, match="dynamic_shapes"):  # of torch's own, whatever its class in this version
        th.FeatureExtractor(net, ["head"], attach=True).to_onnx(X, dynamic_shapes={"y": {0: BATCH}})


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FeatureLayer", "FeatureExtractor"])
def test_the_other_wrappers_are_exported_to_onnx(net: Net, kind: str) -> None:
    hooked: Any = th.FeatureLayer(net, "head", attach=True)
    if kind == "FeatureExtractor":
        hooked = th.FeatureExtractor(net, ["head"], attach=True)
    program = hooked.to_onnx({"x": X})
    names = [output.name for output in program.model.graph.outputs]
    assert names == {"FeatureLayer": ["head", "output.0", "output.1"], "FeatureExtractor": ["head"]}[kind]


def test_without_onnxscript_the_package_is_named(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"onnxscript is needed for this and is not installed: pip install"):
        th.FeatureLayers(net, ["head"], attach=True).to_onnx(X)


# -- captures on programs ------------------------------------------------------------------------------------------


@pytest.mark.shows("Exported: captures on a loaded program, by torch.export.unflatten")
def test_captures_on_a_loaded_program_are_explained_and_work_unflattened(net: Net, tmp_path: Path) -> None:
    torch.export.save(torch.export.export(net, (X,)), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    flat = program.module()
    with pytest.warns(NeverRanWarning, match=r"graph of operations .* torch\.export\.unflatten\(program\)"):
        with th.capture(flat, "block.fc"):
            flat(X)
    with pytest.raises(TypeError, match=r"found ExportedProgram: torch\.export\.unflatten\(program\)"):
        th.capture(program, "block.fc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"found ExportedProgram: torch\.export\.unflatten\(program\)"):
        th.FeatureLayers(program, ["block.fc"])  # type: ignore[arg-type]
    layered = torch.export.unflatten(program)
    with th.capture(layered, "block.fc", "head:input") as rec:
        close(layered(X), net(X))
    close(rec["block.fc"], bare(net, X)["block.fc"].detach())
    close(rec["head:input"], bare(net, X)["head:input"].detach())
