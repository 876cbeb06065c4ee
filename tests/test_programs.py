"""Random programs: what sessions say of them is what bare hooks and finite differences say."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import warned
from tests.programs.draw import draw
from tests.programs.hunt import counterexample, programs
from tests.programs.judge import Verdict, judge
from tests.programs.show import script
from tests.programs.shrink import shrink
from torchhook._core import gradients, keep, listening, taps

SHARDS, PROGRAMS = 10, 50
SHARD = [i if i < 2 else pytest.param(i, marks=pytest.mark.slow) for i in range(SHARDS)]


@pytest.mark.parametrize("shard", SHARD)
def test_sessions_tell_the_truth_about_random_programs_and_leave_no_trace(shard: int) -> None:
    compared = 0
    for judged in programs(PROGRAMS, first=shard * 10_000):
        if judged.verdict.wrong:
            pytest.fail(f"a session is wrong:\n\n{counterexample(judged)}", pytrace=False)
        compared += judged.verdict.counts["grad compared"]
    assert compared > PROGRAMS


def test_a_seed_is_a_program() -> None:
    assert draw(3) == draw(3) != draw(4)
    for seed in range(50):
        assert {"Program", "inputs"} <= {getattr(step, "name", "") for step in ast.parse(draw(seed)).body}


# -- the judge sees ---------------------------------------------------------------------------------------------------

PROGRAM = """
class Program(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()

    def forward(self, x):
        h = self.lin(x)
        return self.relu(h) * 2 + self.same(x).sum()

def inputs():
    return (torch.randn(2, 3, 4).requires_grad_(),)
"""


def kinds(verdict: Verdict) -> set[str]:
    return {wrong.kind for wrong in verdict.wrong}


def test_the_judge_finds_nothing_wrong_where_nothing_is() -> None:
    verdict = judge(PROGRAM)
    assert (verdict.discarded, verdict.wrong) == ("", [])
    assert verdict.counts["grad compared"] == verdict.counts["grad_input compared"] == 4
    assert verdict.counts["values compared"] == 8


def test_the_judge_sees_values_that_were_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "lazy_clone", lambda tensor: tensor)
    assert "value" in kinds(judge(PROGRAM))


def test_the_judge_sees_gradients_that_are_not_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients.GradTap._look
    monkeypatch.setattr(gradients.GradTap, "_look", lambda self, grad, call: right(self, grad * 1.001, call))
    assert kinds(judge(PROGRAM)) >= {"grad", "grad_input", "grad_total"}


def test_the_judge_sees_an_edit_of_a_gradient_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening.Chain, "in_order", lambda self: [])
    assert "disturbed" in kinds(judge(PROGRAM))


def test_the_judge_sees_a_session_that_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps.Tap, "take", lambda self, value, source=(): value * 1.0000001)
    assert "disturbed" in kinds(judge(PROGRAM))


def test_the_judge_sees_hooks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    right = taps.put_after

    def twice(undo: Any, module: nn.Module, hook: Any) -> None:
        right([], module, lambda *_: None)  # and nobody takes it away
        right(undo, module, hook)

    monkeypatch.setattr(taps, "put_after", twice)
    assert "residue" in kinds(judge(PROGRAM))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("h.mul_(2); return h * x.exp_()", "RuntimeError"),
        ("h = checkpoint(self.same, h, use_reentrant=False); d = h.detach(); d.zero_(); return h", "derivative"),
        ("return x.detach()", "no gradients"),
        ("return h.sum() / 0", "large"),
    ],
)
def test_what_torch_itself_cannot_differentiate_is_left_out(step: str, why: str) -> None:
    source = PROGRAM.replace("return self.relu(h) * 2 + self.same(x).sum()", step)
    assert why in judge(source).discarded


# -- the shrinker ----------------------------------------------------------------------------------------------------


def test_a_program_is_shrunk_to_what_still_fails() -> None:
    source = PROGRAM.replace("h = self.lin(x)", "h = self.lin(x)\n        h = h.sin() + 1\n        y = self.same(h)")

    def calls_relu(text: str) -> bool:
        return "self.relu(" in text and not judge(text, only="grad").discarded

    short = shrink(source, calls_relu)
    assert "self.relu(" in short
    assert "sin" not in short
    assert "same" not in short
    assert len(short.splitlines()) <= 13


def test_a_counterexample_is_a_script_of_plain_torch() -> None:
    source = PROGRAM.replace(
        "h = self.lin(x)",
        "h = detach(self.lin(x))\n        with no_grad(h):\n            h.sin_()\n            z = frozen(h * 2)",
    )
    shown = script(source, [])
    assert "h = self.lin(x).detach()" in shown
    assert "with torch.no_grad():" in shown
    assert "z = h * 2" in shown
    names: dict[str, Any] = {}
    dtype = torch.get_default_dtype()
    try:
        with warned():
            exec(shown, names)
    finally:
        torch.set_default_dtype(dtype)
    assert isinstance(names["output"], Tensor)
