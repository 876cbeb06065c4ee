"""Statistics of values against numpy, whatever their type, size and order in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.oracle import BareHooks, copies
from tests.watch.helpers import VALUES, assert_close, by_numpy
from torchhook._values.histograms import Histogram
from torchhook._watch.api import watch


def test_every_layer_of_a_resnet_has_the_statistics_of_what_bare_hooks_cloned() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None).train()
    x = torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(model)
    with BareHooks(twin) as bare:
        twin(x)
    with watch(model, alarms=False) as w:
        model(x).sum().backward()
    sites = {name for name, _ in model.named_modules() if name}
    assert sites == {site for site in w.last if site in sites}
    for site in sites:
        tensors = [c.tensor for frozen in bare.outputs[site] for c in copies(frozen)]
        assert_close(w.last[site], by_numpy(tensors), site)


def test_a_large_mean_does_not_hide_a_small_spread() -> None:
    model = nn.Sequential(nn.Identity())
    x = 1e4 + torch.randn(4096)
    with watch(model, gradients=False) as w:
        model(x)
    assert w.last["0"]["std"] == pytest.approx(x.double().std(correction=0).item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_values_of_any_dtype_are_measured_as_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([[0, 1, 3], [0, 2, 1]]).to(dtype)
    with watch(model, alarms=False) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x]))


def test_complex_values_are_measured_by_their_size() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([3 + 4j, 0j])
    with watch(model) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x.abs()]))


@pytest.mark.parametrize("value", [torch.tensor([1.0, math.nan, 0.0, math.nan]), torch.tensor([math.inf, 0.0])])
def test_values_that_are_not_numbers_are_counted_and_not_hidden(value: Tensor) -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model) as w:
        model(value)
    expected = by_numpy([value])
    assert w.last["0"]["nans"] == expected["nans"]
    assert w.last["0"]["zeros"] == expected["zeros"]
    assert w.last["0"]["max"] == pytest.approx(expected["max"], nan_ok=True)
    assert not math.isfinite(w.last["0"]["mean"])
    assert w.last["0"]["norm"] == pytest.approx(expected["norm"], nan_ok=True)
    assert math.isnan(w.last["0"]["std"])


@pytest.mark.parametrize("statistics", [VALUES, ("norm", "std")])
@pytest.mark.parametrize("value", [[math.inf, 1.0], [-math.inf, 1.0], [math.inf, -math.inf, 0.0], [math.inf, math.nan]])
def test_the_norm_of_an_infinite_value_is_infinite(value: list[float], statistics: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model, statistics=statistics, alarms=False) as w:
        model(torch.tensor(value))
    expected = by_numpy([torch.tensor(value)])
    assert w.last["0"]["norm"] == pytest.approx(expected["norm"], nan_ok=True)
    assert math.isnan(w.last["0"]["std"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e25, 3e37, 1e-23, 1e-36])
def test_very_large_and_very_small_values_have_a_norm_and_a_spread(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(100, 1, bias=False))
    x = (torch.rand(50, 100) * size).to(dtype)
    model[1].to(dtype).weight.data.mul_(1e-3)
    expected = by_numpy([x])
    with watch(model, alarms=False) as w:
        model(x).sum().backward()
    for name in ("std", "norm", "max"):
        assert w.last["0"][name] == pytest.approx(expected[name], rel=1e-4, abs=0), name
    gradient = model[1].weight.grad.double().numpy()
    assert w.last["1.weight"]["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5, abs=0)


def test_statistics_of_tens_of_millions_of_values_are_as_exact_as_those_of_few() -> None:
    x = torch.rand(30_000_000, generator=torch.Generator().manual_seed(0)).square_()
    x[::4] = 0
    model = nn.Sequential(nn.Identity())
    with watch(model, alarms=False) as w:
        model(x)
    expected = by_numpy([x])
    for name in VALUES:
        assert w.last["0"][name] == pytest.approx(expected[name], rel=1e-5, abs=0), name


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 3),
        lambda x: x[:, ::2],
        lambda x: x[:1, :1, :1, :1].expand(2, 3, 4, 5),
    ],
)
def test_the_order_of_elements_in_memory_does_not_matter(change: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Identity())
    x = change(torch.randn(2, 4, 5, 6))
    with watch(model) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x]))


def test_histograms_are_those_of_numpy() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    with watch(model, statistics=["histogram"], bins=16) as w:
        model(x)
    counts, edges = np.histogram(x.double().numpy(), bins=16)
    found = w.last["0"]["histogram"]
    assert np.abs(np.array(found.counts) - counts).sum() <= 2  # a value on an edge may fall on either side
    assert found.edges == pytest.approx(edges.tolist(), rel=1e-5)


def test_histograms_of_gradients_are_taken_at_gradient_sites() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda m, a, out: outputs.append(out) or out.retain_grad())
    with watch(model, "0:grad", "2.weight:grad", statistics=["histogram"], bins=8, parameters=False) as w:
        model(torch.randn(16, 20)).square().sum().backward()
    for site, gradient in (("0:grad", outputs[0].grad), ("2.weight:grad", model[2].weight.grad)):
        counts, edges = np.histogram(gradient.double().numpy(), bins=8)
        assert np.abs(np.array(w.last[site]["histogram"].counts) - counts).sum() <= 2
        assert w.last[site]["histogram"].edges == pytest.approx(edges.tolist(), rel=1e-5)


def test_histograms_of_several_calls_lose_nobody() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> None:
            for factor in (1, 5, 0):
                self.same(x * factor)

    model = Thrice()
    x = torch.linspace(-1, 1, 100)
    with watch(model, statistics=["histogram"], bins=10) as w:
        model(x)
    counts, edges = np.histogram(np.concatenate([x, 5 * x, 0 * x]), bins=10)
    found = w.last["same"]["histogram"]
    assert sum(found.counts) == 300
    assert found.edges == pytest.approx(edges.tolist())
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= 60  # within one bin of where they were


class Rectified(nn.Module):
    """One layer that runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, *values: Tensor) -> None:
        for value in values:
            self.relu(value)


def test_histograms_are_of_the_finite_values() -> None:
    x = torch.linspace(0, 1, 100)
    bad = torch.cat([x * 2, torch.tensor([math.inf, math.nan])])
    model = Rectified()
    with watch(model, statistics=["histogram"], bins=10, alarms=False) as w:
        for values in ([x, bad], [bad], [torch.full((3,), math.inf), x], [torch.full((3,), math.nan)]):
            model(*values)
    both, one, beside, none = (shot.sites["relu"] for shot in w.history)
    assert sum(both["histogram"].counts) == 200
    assert both["histogram"].edges == pytest.approx(np.linspace(0, 2, 11))
    for found, values in ((one, x * 2), (beside, x)):
        counts, edges = np.histogram(values.double().numpy(), bins=10)
        assert np.abs(np.array(found["histogram"].counts) - counts).sum() <= 4
        assert sum(found["histogram"].counts) == 100
        assert found["histogram"].edges == pytest.approx(edges.tolist(), rel=1e-5)
    assert "histogram" not in none


def test_a_histogram_of_equal_values_counts_those_that_are_numbers() -> None:
    model = Rectified()
    with watch(model, statistics=["histogram"], bins=4, alarms=False) as w:
        model(torch.tensor([2.0, 2.0, math.nan, math.inf]))
    assert w.last["relu"]["histogram"] == Histogram([2, 0, 0, 0], [2.0] * 5)


def test_a_histogram_of_huge_values_loses_nobody() -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model, statistics=["histogram"], bins=4, alarms=False) as w:
        model(torch.tensor([-3e38, 0.0, 0.0, 3e38]))
    assert w.last["0"]["histogram"].counts == [1, 0, 2, 1]
