"""The guard on a GPU: the same answers as on the CPU, before the model returns, and without waiting for each."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.guard.faults import FAULTS, Apply, run
from torchhook._guard.api import guard
from torchhook.errors import GuardError

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass

ON_CPU_ONLY = {"autocast", "autocast to half", "custom function, unseen", "a plain attribute"}
# On a GPU, autograd recomputes on a thread of its own, where no operation is seen: the checkpoint itself is named.
ON_CPU_ONLY |= {"custom function in backward", "custom function in the model itself", "checkpointed, root at 0"}
ON_CPU_ONLY |= {"multi-head attention, fully masked", "out=", "memory of its own, then in place"}


def to_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(to_gpu, value))
    return value.cuda() if isinstance(value, Tensor) else value


def found_on_gpu(name: str, bad: bool) -> list[tuple[str, str]]:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(bad).cuda(), to_gpu(case.inputs(bad))
    with guard(model, action="record") as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    return [(finding.kind, str(finding.site)) for finding in g.findings]


def test_every_producer_is_named() -> None:
    names = [name for name in FAULTS if name not in ON_CPU_ONLY]
    found = {name: found_on_gpu(name, True) for name in names}
    assert found == {name: [(FAULTS[name].kind, FAULTS[name].site)] for name in names}


def test_no_clean_twin_raises_an_alarm() -> None:
    found = {name: found_on_gpu(name, False) for name in FAULTS if name not in ON_CPU_ONLY}
    assert [name for name, findings in found.items() if findings] == []


def test_an_error_comes_before_the_output_does() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model = nn.Sequential(*layers, Apply(lambda x: x - x.amax() - 1), Apply(torch.sqrt)).cuda()
    output, caught = None, None
    with guard(model):
        try:
            output = model(torch.ones(2, 4, device="cuda"))
        except GuardError as error:
            caught = error
    assert output is None
    assert "'4/sqrt#0' made 8 NaN" in str(caught)


def test_the_device_is_asked_once_for_many_operations() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(20)]).cuda()
    x = torch.ones(2, 4, device="cuda")
    with guard(model) as g:
        model(x)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            model(x)
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in seen if "called a synchronizing" in str(w.message)]
    assert g.findings == []
    assert len(waits) <= 1


def test_both_ways_say_the_same() -> None:
    for name in FAULTS:
        if name not in ON_CPU_ONLY:
            assert said_on_gpu(name, False) == said_on_gpu(name, True), name


def said_on_gpu(name: str, thorough: bool) -> list[str]:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(True).cuda(), to_gpu(case.inputs(True))
    with guard(model, action="record", thorough=thorough) as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    return [str(finding) for finding in g.findings]


def test_random_numbers_of_the_device_are_drawn_again() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Apply(lambda x: x.sqrt()), nn.Linear(64, 64)).cuda()
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(3)
    zeros = int((torch.nn.functional.dropout(x, 0.5) == 0).sum())
    torch.cuda.manual_seed(3)
    with guard(model, action="record") as g:
        model(x).sum().backward()
        after = torch.rand(1, device="cuda")
    (finding,) = g.findings
    assert str(finding.site) == "1/sqrt#0:grad_input"
    assert finding.outputs[0].inf + finding.outputs[0].neg_inf == zeros
    torch.cuda.manual_seed(3)
    torch.nn.functional.dropout(x, 0.5)
    assert torch.equal(after, torch.rand(1, device="cuda"))


def test_a_repeated_backward_pass_leaves_gradients_alone() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (x - x).sqrt()), nn.Linear(4, 4)).cuda()

    x, model, twin = torch.ones(2, 4, device="cuda"), build(), build()
    twin(x).sum().backward()
    with guard(model, action="record") as g:
        model(x).sum().backward()
    assert [str(f.site) for f in g.findings] == ["1/sqrt#0:grad_input"]
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)
    caught = None
    try:
        with guard(model):
            model(x).sum().backward()
    except GuardError as error:
        caught = error
    assert "'1/sqrt#0:grad_input' made" in str(caught)


def test_autocast_and_low_precision_raise_no_false_alarm() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    large = Apply(lambda x: x * 0 + torch.finfo(x.dtype).min)
    for dtype in (torch.float16, torch.bfloat16):
        guarded = nn.Sequential(model, large)
        with guard(guarded) as g, torch.autocast("cuda", dtype=dtype):
            guarded(torch.randn(256, 64, device="cuda"))
        assert g.findings == []


def test_a_run_that_is_captured_into_a_graph_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda().eval()
    x = torch.ones(2, 4, device="cuda")
    with torch.no_grad(), guard(model, action="record") as g:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        graph.replay()
        model(x * float("nan"))
    torch.testing.assert_close(output, model(x))
    assert [f.kind for f in g.findings] == ["input"]
