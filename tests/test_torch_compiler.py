"""What is asked of torch's compiler, and what is done where it does not answer."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from tests.oracle import in_threads, stance
from torchhook._torch import compiler
from torchhook.errors import TorchVersionError


def test_a_stance_is_asked_for_at_each_call_and_goes_without_a_trace() -> None:
    before: Any = torch._dynamo.eval_frame._stance
    before = getattr(before, "before", before)  # a stand-in that was left gives way
    said: list[str | None] = [None]
    restore = compiler.take_stance(lambda: said[0])
    assert stance() == "default"
    said[0] = "force_eager"
    assert stance() == "force_eager"
    assert torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe is False
    restore()
    restore()
    assert torch._dynamo.eval_frame._stance is before


def test_a_stance_may_differ_between_threads() -> None:
    main = threading.current_thread()
    restore = compiler.take_stance(lambda: "force_eager" if threading.current_thread() is main else None)
    assert (stance(), *in_threads(stance)) == ("force_eager", "default")
    restore()


def test_where_torch_keeps_its_stance_in_another_way_it_is_eager_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = object()
    monkeypatch.setattr(torch._dynamo.eval_frame, "_stance", elsewhere)
    restore = compiler.take_stance(lambda: None)
    assert (stance(), *in_threads(stance)) == ("force_eager", "force_eager")
    restore()
    assert torch._dynamo.eval_frame._stance is elsewhere


def test_whether_compiled_code_runs_is_what_the_stance_of_the_thread_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.runs_compiled_code()
    restore = compiler.take_stance(lambda: "force_eager")
    assert not compiler.runs_compiled_code()
    restore()
    with torch.compiler.set_stance("force_eager"):
        assert not compiler.runs_compiled_code()
    assert compiler.runs_compiled_code()
    monkeypatch.delattr(torch._dynamo.eval_frame, "_stance")  # as where torch keeps it elsewhere
    assert compiler.runs_compiled_code()


def test_compiled_code_is_known_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        found.append(compiler.in_compiled_code())
        return x

    assert not compiler.in_compiled_code()
    torch.compile(look, backend="eager")(torch.ones(1))
    look(torch.ones(1))
    assert found == [True, False]
    monkeypatch.setattr(compiler, "_frame_callback", lambda: None)  # as where it has vanished
    assert not compiler.in_compiled_code()


def test_a_setting_that_torch_does_not_have_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = "torch._dynamo.config.skip_nnmodule_hook_guards = False"
    assert (setting in compiler.hook_guards()) == hasattr(torch._dynamo.config, "skip_nnmodule_hook_guards")
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", object())
    assert compiler.hook_guards() == ""


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if compiler.is_exporting() else x


@pytest.mark.skipif(not hasattr(torch.compiler, "_is_exporting_flag"), reason="this torch cannot tell")
def test_what_is_compiled_is_not_exported() -> None:
    torch._dynamo.reset()
    x = torch.zeros(1)
    assert Asks()(x) == 0
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(x) == 0
    assert torch.export.export(Asks(), (x,), strict=False).module()(x) == 1
    assert torch.export.export(Asks(), (x,), strict=True).module()(x) == 1


def test_modules_know_that_they_were_compiled() -> None:
    inside, outside = nn.ReLU(), nn.ReLU()
    inside.compile(backend="eager")
    assert compiler.is_compiled(inside)
    assert compiler.is_compiled(torch.compile(outside, backend="eager"))
    assert not compiler.is_compiled(outside)


def test_what_a_compiled_call_returns_can_be_changed() -> None:
    module = nn.ReLU()
    module.compile(backend="eager")
    compiler.after_compiled_call(module, lambda value: value + 1)
    assert module(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]
    with pytest.raises(TorchVersionError, match="to copy features out of CUDA graphs"):
        compiler.after_compiled_call(nn.ReLU(), lambda value: value)
