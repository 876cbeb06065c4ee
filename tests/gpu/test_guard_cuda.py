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
    assert len(waits) <= 4
