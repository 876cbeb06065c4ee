"""What a tool holds on to: nothing once it is closed and dropped, without the help of the garbage collector."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits

pytestmark = pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")


class Net(nn.Module):
    """Everything that tools look at: convolutions, in-place layers, attention, operations, reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.attn, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        tokens = x.flatten(2).mT
        tokens = tokens + self.attn(tokens, tokens, tokens)[0]
        return self.fc(self.relu(tokens).mean(1))


class Writer(Net):
    """One whose calls may be the steps of a generation, which are counted."""

    def generate(self, x: Tensor) -> Tensor:
        return self(x)


def captured(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "**") as rec:
        model(x)
    return rec


def captured_inputs(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "**", port="input", keep="clone") as rec:
        model(x)
    return rec


def live(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "conv", "fc", keep="live") as rec:
        model(x)
    return rec


def gradients(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "conv:grad", "relu:grad_input", "attn:grad", "fc:grad_total", "fc.weight:grad") as rec:
        model(x).sum().backward()
    model.zero_grad()
    return rec


def without_backward(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "**:grad", "**:grad_input") as rec:
        model(x)
    return rec


def edited(model: nn.Module, x: Tensor) -> Any:
    with th.edit(model, {"conv": edits.scale(2.0), "fc:grad": edits.zero()}) as rec:
        model(x).sum().backward()
    model.zero_grad()
    return rec


def operations(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "/flatten", "/add:input", "conv/conv2d") as rec:
        model(x)
    return rec


def stopped(model: nn.Module, x: Tensor) -> Any:
    return th.run(model, x, capture="bn", stop=True)


def failed(model: nn.Module, x: Tensor) -> Any:
    try:
        with th.capture(model, "**", "/flatten", "conv:grad") as rec:
            model(x)
            raise ValueError
    except ValueError:
        return rec


def guarded(model: nn.Module, x: Tensor) -> Any:
    with th.guard(model) as g:
        model(x).sum().backward()
    model.zero_grad()
    return g


def watched(model: nn.Module, x: Tensor) -> Any:
    with th.watch(model, log=lambda step, values: None) as w:
        for _ in range(2):
            model(x).sum().backward()
    model.zero_grad()
    return w


def clipped(model: nn.Module, x: Tensor) -> Any:
    with th.clip_gradients(model, 1.0) as handle:
        model(x).sum().backward()
    model.zero_grad()
    return handle


def unopened(model: nn.Module, x: Tensor) -> Any:
    with pytest.warns(th.errors.NeverOpenedWarning):
        th.capture(model, "**", "conv:grad", "/flatten")


def dropped_open(model: nn.Module, x: Tensor) -> Any:
    session = th.capture(model, "**", "conv:grad", "/flatten").open()
    model(x)
    return session


def managed(model: nn.Module, x: Tensor) -> Any:
    manager = th.HookManager(model)
    manager.add("conv", inputs=True, grad=True)
    model(x).sum().backward()
    model.zero_grad()
    return manager


def extracted(model: nn.Module, x: Tensor, folder: Path) -> Any:
    return th.extract(model, x, "bn", Path(tempfile.mkdtemp(dir=folder)) / "store", progress=False)


TOOLS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (captured, captured_inputs, live, gradients, without_backward, edited, operations, stopped, failed)
}
TOOLS |= {f.__name__: f for f in (guarded, watched, clipped, unopened, dropped_open, managed, extracted)}
TOOLS |= {
    "layers": lambda model, x: th.layers(model, inputs=x),
    "ops": lambda model, x: th.ops(model, x),
    "attention": lambda model, x: th.attention(model, x),
    "cam": lambda model, x: th.cam(model, x, layer="bn"),
    "report": lambda model, x, folder: th.report(model, x, out=folder / "report.html"),
    "diff": lambda model, x: th.diff(model, Net(), x),
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Net, Writer])
@pytest.mark.parametrize("tool", TOOLS)
def test_batch_and_model_go_when_they_are_dropped_though_the_result_stays(
    tool: str, kind: type[Net], uncollected: None, tmp_path: Path
) -> None:
    run = TOOLS[tool]
    for _ in range(2):  # the first time, torch and others fill caches of their own
        model, x = kind(), torch.randn(2, 3, 8, 8)
        parts = [weakref.ref(x), weakref.ref(model), weakref.ref(model.conv.weight)]
        result = run(model, x, tmp_path) if run.__code__.co_argcount == 3 else run(model, x)
        if tool in ("dropped_open", "managed"):
            del result
            result = None
        holds_graph = tool == "live"
        del model, x
        left = [ref() is not None for ref in parts]
    assert left == [holds_graph, False, holds_graph], left
    del result


@pytest.mark.parametrize("kind", [Net, Writer])
@pytest.mark.parametrize("tool", ["captured", "gradients", "operations", "live", "dropped_open", "stopped", "failed"])
def test_what_was_kept_goes_with_the_recording(tool: str, kind: type[Net], uncollected: None) -> None:
    model, x = kind(), torch.randn(2, 3, 8, 8)
    for _ in range(2):
        result = TOOLS[tool](model, x)
        rec = result[1] if isinstance(result, tuple) else getattr(result, "recording", result)
        kept = [weakref.ref(record.value) for record in rec.records() if isinstance(record.value, Tensor)]
        assert kept
        del result, rec
    assert [ref for ref in kept if ref() is not None] == []
