"""Weights that accelerate keeps elsewhere are read with their numbers, as they are while their module runs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchhook._capture import capture, run
from torchhook._classic.api import FeatureExtractor
from torchhook._core.offload import has_offloaded, is_offloaded, loaded
from torchhook._diff.api import diff
from torchhook._extract.api import extract
from torchhook._extract.fingerprint import of_model
from torchhook._features.api import open_features
from torchhook._guard.api import guard
from torchhook._layers.api import ops
from torchhook._report.api import report
from torchhook._watch.api import watch
from torchhook.errors import NeverRanWarning, SessionError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        net[1].running_mean.normal_()
    return net


@pytest.fixture(params=["cpu", "disk", "buffers too"])
def offloaded(request: Any, tmp_path: Path) -> nn.Sequential:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    net = model()
    if request.param == "disk":
        accelerate.disk_offload(net, str(tmp_path / "weights"), execution_device="cpu")
    else:
        accelerate.cpu_offload(net, execution_device="cpu", offload_buffers=request.param == "buffers too")
    return net


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.shows("Offloading: captures of weights that accelerate holds elsewhere")
def test_captured_weights_have_the_numbers_that_were_loaded(offloaded: nn.Sequential) -> None:
    assert offloaded[0].weight.device.type == "meta"
    _, rec = run(offloaded, X, capture=["0.weight", "3.bias", "1.running_mean", "0", "3"])
    original: Any = model()
    assert torch.equal(rec["0.weight"], original[0].weight)
    assert torch.equal(rec["3.bias"], original[3].bias)
    assert torch.equal(rec["1.running_mean"], original[1].running_mean)
    assert torch.equal(rec["3"], original(X))
    assert offloaded[0].weight.device.type == "meta"


@pytest.mark.shows("Offloading: watch and report")
def test_weights_are_watched_and_reported(offloaded: nn.Sequential, tmp_path: Path) -> None:
    with watch(offloaded, "0.weight", parameters=False, gradients=False) as w:
        offloaded(X)
    weight: Tensor = model()[0].weight
    assert w.last["0.weight"]["norm"] == pytest.approx(weight.norm().item(), rel=1e-5)
    page = report(offloaded, X, out=tmp_path / "a.html", gradients=False).read_text()
    rms = weight.square().mean().sqrt().item()
    assert f"{rms:.6f}"[:6] in page


@pytest.mark.shows("Offloading: guard")
@pytest.mark.parametrize("how", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["0.weight", "3.bias"])
def test_a_guard_names_the_weight_and_not_what_loads_it(how: str, name: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    net = model()
    with torch.no_grad():
        net.get_parameter(name).view(-1)[0] = math.nan
    if how == "disk":
        accelerate.disk_offload(net, str(tmp_path / "weights"), execution_device="cpu")
    else:
        accelerate.cpu_offload(net, execution_device="cpu")
    with guard(net, action="record") as g, torch.no_grad():
        net(X)
    module = name.partition(".")[0]
    assert [(f.kind, str(f.site), str(f.used_by)) for f in g.findings] == [("parameter", name, f"{module}/linear#0")]


def test_what_loads_a_weight_is_no_operation_of_the_model(offloaded: nn.Sequential) -> None:
    found = [str(op) for op in ops(offloaded, X)]
    assert found == [str(op) for op in ops(model(), X)]


def test_the_gradient_of_an_offloaded_weight_goes_with_the_copy_that_was_loaded(offloaded: nn.Sequential) -> None:
    with pytest.warns(
        NeverRanWarning, match=r"'3.weight:grad': it is offloaded by accelerate, which loads a copy"
    ) as w:
        with capture(offloaded, "3.weight:grad", "3:grad") as rec:
            offloaded(X).sum().backward()
    assert len(w) == 1
    assert torch.equal(rec["3:grad"], torch.ones(5, 3))
    assert list(rec.missing) == ["3.weight:grad"]
    assert "another tensor" not in str(rec)


def test_an_offloaded_model_is_compared_with_the_same_one(offloaded: nn.Sequential) -> None:
    for local in (False, True):
        for a, b in ((offloaded, model()), (model(), offloaded)):
            result = diff(a, b, X, rtol=0, atol=0, local=local)
            assert result.ok
            assert all(row.elements and "without numbers" not in row.note for row in result)


def test_features_of_an_offloaded_model_are_those_of_the_same_one(offloaded: nn.Sequential, tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(X)
    extract(offloaded, torch.utils.data.DataLoader(data, batch_size=2), ["3"], out=tmp_path / "f")
    with torch.no_grad():
        assert torch.allclose(torch.as_tensor(open_features(tmp_path / "f")["3"][:]), model()(X))
    assert offloaded[0].weight.device.type == "meta"


def test_a_fingerprint_tells_offloaded_weights_apart(offloaded: nn.Sequential) -> None:
    accelerate = pytest.importorskip("accelerate")
    other = model()
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    assert of_model(offloaded) == of_model(model())
    accelerate.cpu_offload(other, execution_device="cpu")
    assert of_model(other) != of_model(offloaded)


class Unknown:
    """A keeper of weights that says nothing of how to load them."""

    __module__ = "accelerate.hooks"


@pytest.mark.shows("Offloading: weights that cannot be loaded", error="SessionError")
def test_weights_that_cannot_be_loaded_are_refused() -> None:
    net: Any = nn.Linear(2, 2)
    kept = copy.deepcopy(net)
    net.to("meta")
    net.keeper = Unknown()
    assert is_offloaded(net)
    net.forward = kept.forward
    with pytest.raises(SessionError, match=r"'weight' of this Linear is offloaded by accelerate"):
        run(net, torch.ones(1, 2), capture="weight")


def test_a_model_that_is_meant_to_be_on_the_meta_device_is_no_offloaded_one() -> None:
    net = model().to("meta")
    assert not has_offloaded(net)
    _, rec = run(net, torch.ones(2, 4, device="meta"), capture="0.weight")
    assert rec["0.weight"].device.type == "meta"
    with loaded(net[0]):
        assert net[0].weight.device.type == "meta"


@pytest.mark.parametrize("site", ["0", "0/linear", "0:input", "3/linear"])
@pytest.mark.parametrize("how", ["run", "attached"])
def test_weights_are_taken_back_where_the_forward_pass_ended_early(
    offloaded: nn.Sequential, site: str, how: str
) -> None:
    before = [tensor.device for tensor in (*offloaded.parameters(), *offloaded.buffers())]
    with torch.no_grad():
        if how == "run":
            _, rec = run(offloaded, X, capture=site, stop=True)
            value = rec[site]
        else:
            value = FeatureExtractor(offloaded, [site], stop=True, attach=True)(X)[site]
        original: Any = model()
        expected = {"0": original[0], "0/linear": original[0], "0:input": lambda x: x, "3/linear": original}
        assert torch.equal(value, expected[site](X))
    assert [tensor.device for tensor in (*offloaded.parameters(), *offloaded.buffers())] == before


def test_a_hook_of_ones_own_beside_those_of_accelerate_is_not_told_of_an_output(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Sees(accelerate.hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output + 1

    net = model()
    accelerate.cpu_offload(net, execution_device="cpu")
    accelerate.hooks.add_hook_to_module(net[0], Sees(), append=True)
    _, rec = run(net, X, capture="0/linear", stop=True)
    assert torch.equal(rec["0/linear"], model()[0](X))
    assert net[0].weight.device.type == "meta"
