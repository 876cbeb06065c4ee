"""The columns of ``layers``: trainable, kernels, multiply-adds, time, memory; and totals that are true."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchhook as th
from tests.language_models import ENDS, made


def gpt2(layers: int = 2, attention: str = "sdpa") -> nn.Module:
    return made("gpt2", attn_implementation=attention, n_layer=layers, n_embd=16, n_head=2, **ENDS)


IDS = torch.arange(10)[None]


def test_no_line_of_a_language_models_table_is_longer_than_a_screen() -> None:
    table = str(th.layers(gpt2(12), IDS))
    assert max(map(len, table.splitlines())) < 140
    assert "last_hidden_state (1, 10, 16) + cache of 12 layers" in table


def test_the_header_counts_what_it_shows() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 2))
    assert str(th.layers(model)).startswith("Sequential: 4 layers, 17 parameters\n")
    assert str(th.layers(model, depth=1)).startswith("Sequential: 2 of 4 layers, 17 parameters\n")
    model[0].requires_grad_(False)
    assert th.layers(model).title == "Sequential: 4 layers, 17 parameters, 8 of them trainable"


def test_multiply_adds_are_those_computed_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    found = th.layers(model, torch.rand(2, 4, 6, 6), columns="all")
    conv, linear = 2 * 8 * (4 // 2) * 9 * 36, 2 * 8 * 5
    assert [layer.multiply_adds for layer in found] == [conv + linear, conv, 0, 0, 0, linear]


@pytest.mark.parametrize("build", [lambda: gpt2(attention="eager"), gpt2], ids=["eager", "fused"])
def test_multiply_adds_of_attention_do_not_depend_on_its_kernel(build: Any) -> None:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gpt2(attention="eager")(IDS)
    found = th.layers(build(), IDS, columns=["multiply_adds"])
    assert found[""].multiply_adds == counter.get_total_flops() // 2
    flops = {
        name.removeprefix("GPT2LMHeadModel."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()
    }
    for layer in found:
        if layer.name in flops:
            assert layer.multiply_adds == flops[layer.name] // 2, layer.name


def test_multiply_adds_of_a_real_model_are_those_of_the_flop_counter() -> None:
    models = pytest.importorskip("torchvision.models")
    model, x = models.resnet18().eval(), torch.rand(1, 3, 64, 64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    found = th.layers(model, x, columns=("multiply_adds", "kernel"))
    flops = {name.removeprefix("ResNet."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    assert found[""].multiply_adds == counter.get_total_flops() // 2
    assert all(found[name].multiply_adds == n // 2 for name, n in flops.items() if name in found)
    assert (found["conv1"].kernel, found["maxpool"].kernel, found["bn1"].kernel) == ((7, 7), (3, 3), None)
    assert "7×7" in str(found)


def test_a_module_that_runs_twice_or_inside_itself_is_counted_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, deeper: bool = True) -> Tensor:
            x = self.linear(x)
            return self(x, False) if deeper else x

    found = th.layers(Twice(), torch.rand(1, 3), columns="multiply_adds")
    assert (found[""].multiply_adds, found["linear"].multiply_adds) == (18, 18)


def test_counting_leaves_the_fast_path_of_attention_as_it_was() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, before = torch.rand(1, 5, 8), torch.backends.mha.get_fastpath_enabled()
    found = th.layers(model, (x, x, x), columns="multiply_adds")
    # Three projections in, one out, and two products of 5 × 5 × 8.
    assert found[""].multiply_adds == 4 * 5 * 8 * 8 + 2 * 5 * 5 * 8
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_outputs_of_several_tensors_have_a_tuple_of_shapes() -> None:
    found = th.layers(nn.LSTM(3, 4, batch_first=True), torch.rand(2, 5, 3))
    assert found[""].shape == ((2, 5, 4), (1, 2, 4), (1, 2, 4))
    assert found[""].output == "((2, 5, 4), ((1, 2, 4), (1, 2, 4)))"


def test_memory_and_totals_are_those_of_the_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4).requires_grad_(False)))
    found = th.layers(model, torch.rand(5, 2), columns=["trainable", "memory", "multiply_adds"], depth=1)
    assert [layer.memory for layer in found] == [80, 60, 80]
    last = str(found).splitlines()[-1]
    # Of the leaves, those below the depth that is shown too.
    assert last == (
        "total: 9 trainable parameters, 200 B of outputs of the layers that hold no others, 90 multiply-adds"
    )


def test_time_is_that_of_one_run() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    found = th.layers(model, torch.rand(8, 64), columns="time")
    assert all(layer.seconds and layer.seconds > 0 for layer in found)
    assert sum(found[name].seconds or 0 for name in "01") <= (found[""].seconds or 0)
    assert re.search(r"total: \d+\.\d\d ms in one pass", str(found))


def test_columns_stand_in_the_order_that_was_asked_for() -> None:
    lines = str(th.layers(nn.Sequential(nn.Linear(2, 3)), columns=["parameters", "type"])).splitlines()
    assert lines[1].split() == ["layer", "parameters", "type"]
    assert th.layers(nn.ReLU(), columns="all").table().columns == ["layer", "type", "kernel", "parameters", "trainable"]


def test_a_wrong_column_offers_the_closest_and_one_of_a_run_asks_for_inputs() -> None:
    with pytest.raises(ValueError, match=r"columns: 'multiplyadds' is none of .*Closest: 'multiply_adds'"):
        th.layers(nn.ReLU(), torch.ones(1), columns="multiplyadds")
    with pytest.raises(ValueError, match="columns: 'flops' is none of 'type'") as error:
        th.layers(nn.ReLU(), torch.ones(1), columns=["flops"])
    assert str(error.value).count("'kernel'") == 1
    with pytest.raises(ValueError, match="columns: 'memory' is known after a run: give inputs="):
        th.layers(nn.ReLU(), columns=["type", "memory"])


# -- shapes without memory ---------------------------------------------------------------------------


def test_shapes_need_no_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(200_000, 200_000), nn.ReLU(), nn.Linear(200_000, 10))
    # The inputs may be real: only their shapes are needed.
    found = th.layers(huge, torch.ones(3, 200_000), columns="all")
    assert [layer.shape for layer in found] == [(3, 10), (3, 200_000), (3, 200_000), (3, 10)]
    assert found["0"].multiply_adds == 3 * 200_000**2
    with pytest.raises(ValueError, match="'time' needs a real run"):
        th.layers(huge, torch.ones(3, 200_000), columns="time")


def test_a_real_model_can_be_asked_for_its_shapes_alone() -> None:
    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            devices.append(x.device.type)
            return x

    devices: list[str] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Notes()).train()
    before = [p.clone() for p in model.parameters()]
    own, x = list(model.parameters()), torch.rand(1, 3, 8, 8)
    found = th.layers(model, x, device="meta")
    assert found[""].shape == (1, 4, 6, 6)
    assert devices == ["meta"]
    assert all(p is q and torch.equal(p, r) for p, q, r in zip(model.parameters(), own, before, strict=True))
    assert model.training
    with pytest.raises(ValueError, match="device='cuda': the model runs where it is"):
        th.layers(model, x, device="cuda")  # type: ignore[arg-type]


# -- operations ----------------------------------------------------------------------------------------


def test_operations_have_the_shapes_of_what_they_returned() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = x.relu().sum(0).relu().topk(2)
            return values

    found = {op.name: op for op in th.ops(Net(), torch.rand(2, 3))}
    assert found["sum"].output == "(3,)"
    assert (found["relu"].calls, found["relu"].output) == (2, "(2, 3) and 1 more")
    assert found["topk"].output == "topk{values=(2,), indices=(2,)}"
    assert "(3,)" in str(th.ops(Net(), torch.rand(2, 3)))
