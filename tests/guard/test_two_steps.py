"""The cheap first pass and the repetition give the answers of the thorough way, to the letter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.guard.faults import FAULTS, INF, NAN, Apply, at_zero, ones, run
from torchhook._guard import repetition
from torchhook._guard.api import guard


def found(model: nn.Module, inputs: Any, case: Any, thorough: bool) -> list[str]:
    torch.manual_seed(0)
    with guard(model, action="record", thorough=thorough) as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    return [str(finding) for finding in g.findings]


@pytest.mark.parametrize("name", FAULTS)
def test_a_finding_reads_the_same_in_both_ways(name: str) -> None:
    case, said = FAULTS[name], []
    for thorough in (False, True):
        torch.manual_seed(0)
        said.append(found(case.model(True), case.inputs(True), case, thorough))
    assert said[0] == said[1]
    assert said[0]


class Counted:
    """How often runs were repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        again = repetition.Repetition._again

        def counted(*args: Any) -> None:
            self.times += 1
            again(*args)

        monkeypatch.setattr(repetition.Repetition, "_again", counted)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


# -- the first pass


def test_no_operation_is_listened_to_while_nothing_is_wrong(repeated: Counted) -> None:
    modes: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: modes.append(torch._C._len_torch_function_stack()) or x))
    with guard(model):
        model(ones()).sum().backward()
    assert modes == [0]
    assert repeated.times == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_that_overflow_are_no_suspicion(dtype: torch.dtype, repeated: Counted) -> None:
    model = nn.Sequential(Apply(lambda x: x * 1), nn.ReLU())
    with guard(model) as g:
        for _ in range(3):
            model(torch.full((64, 64), torch.finfo(dtype).min, dtype=dtype))
    assert (g.findings, repeated.times) == ([], 0)


def test_a_mask_that_leaves_its_module_is_looked_into_ever_more_rarely(repeated: Counted) -> None:
    model = nn.Sequential(Apply(lambda x: x.masked_fill(x < 0, -INF)), nn.Softmax(dim=-1))
    with guard(model) as g:
        for _ in range(64):
            model(torch.tensor([[1.0, -1.0, 2.0, 3.0]]))
    assert g.findings == []
    assert repeated.times <= 8


def test_a_nan_where_a_mask_was_is_found_at_once(repeated: Counted) -> None:
    model = nn.Sequential(Apply(lambda x: (x / x).masked_fill(x < 0, -INF)), nn.Softmax(dim=-1))
    with guard(model, action="record") as g:
        for last in (1.0, 1.0, 1.0, 1.0, 1.0, 0.0):
            model(torch.tensor([[1.0, -1.0, 2.0, last]]))
    assert [(str(f.site), f.run) for f in g.findings] == [("0/div#5", 5)]
    assert repeated.times == 5  # the first, then the first, second and fourth that are like it, and this one


def test_a_fault_that_comes_in_every_run_is_counted_and_not_repeated_each_time(repeated: Counted) -> None:
    model = nn.Sequential(Apply(lambda x: x.log()), nn.Linear(4, 4))
    with guard(model, action="record") as g:
        for _ in range(100):
            model(ones() * 0)
    assert [(str(f.site), f.times) for f in g.findings] == [("0/log#0", 100)]
    assert repeated.times < 20


def test_what_vanishes_inside_a_module_is_seen_by_the_thorough_way_only() -> None:
    model = nn.Sequential(Apply(lambda x: torch.where(x > 0, x.sqrt(), 0.0)), nn.Linear(4, 4))
    with guard(model) as g:
        model(-ones())
    with guard(model, action="record", thorough=True) as h:
        model(-ones())
    assert (g.findings, [str(f.site) for f in h.findings]) == ([], ["0/sqrt#0"])


def test_what_vanishes_inside_a_module_is_found_once_it_spoils_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: torch.where(x > 0, x.sqrt(), 0.0)))
    nn.init.constant_(model[0].weight, -1.0)
    with guard(model, action="record") as g:
        model(ones()).sum().backward()
    assert [(str(f.site), f.phase) for f in g.findings] == [("1/sqrt#0", "forward")]


def test_a_module_that_is_called_by_itself_is_a_run() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(Apply(lambda x: x.log())), "b": nn.Linear(4, 4)})
    with guard(model, action="record") as g:
        model["b"](ones())
        model["a"](ones() * 0)
    assert [(str(f.site), f.run) for f in g.findings] == [("a.0/log#0", 1)]


# -- the repetition is the same run


class Stateful(nn.Module):
    """Everything that a run may move: random numbers, statistics, caches, counters."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm, self.out = nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))
        self.count, self.cache, self.last = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.cache.append(x.detach())
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        y = self.drop(self.norm(self.out(x))) * self.average
        self.last = y
        return y / (y != 0) if self.count == 3 else y


def snapshot(model: nn.Module) -> list[Any]:
    tensors = [t.clone() for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [tensors, grads, torch.get_rng_state(), model.count, len(model.cache)]


def test_a_repetition_leaves_no_trace_and_finds_what_chance_made() -> None:
    import copy

    built = Stateful()
    torch.manual_seed(1)
    model, twin = copy.deepcopy(built), copy.deepcopy(built)
    x = torch.randn(8, 4)
    ends = []
    for one, way in ((twin, None), (model, guard(model, action="record"))):
        torch.manual_seed(5)
        with way if way is not None else torch.enable_grad() as g:
            for _ in range(3):
                output = one(x)
                output[output.isfinite()].sum().backward()
        ends.append([*snapshot(one), one.last.detach()])
        assert one.last.grad_fn is not None
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0, equal_nan=True)
    # Divisions of the runs before were not counted, and are taken to have been as many as in this one.
    assert [(str(f.site), f.run) for f in g.findings] == [("/div#2", 2)]
    zeros = int((twin.last == 0).sum())
    assert zeros
    assert g.findings[0].outputs[0].nan == zeros


def test_a_graph_goes_back_as_it_would_have_after_a_finding() -> None:
    for training in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Apply(lambda x: torch.stack([x, x.detach() * NAN])))
        model.train(training)
        x = torch.randn(4, 4)
        model(x)[0].square().sum().backward()
        expected = model[0].weight.grad.clone()
        model.zero_grad()
        model[1].reset_running_stats()
        with guard(model, action="record", backward=False) as g:
            model(x)[0].square().sum().backward()
        assert g.findings
        if training:
            torch.testing.assert_close(model[0].weight.grad, expected)


def test_inputs_that_the_model_overwrites_are_shown_as_they_were() -> None:
    model = nn.Sequential(Apply(lambda x: x.sub_(1)), Apply(lambda x: x.log_()))
    x = torch.tensor([[1.0, 2.0]])
    with guard(model, action="record") as g:
        model(x)
    assert (g.findings[0].inputs[0].min, g.findings[0].inputs[0].max) == (0.0, 1.0)
    assert x.tolist() == [[-INF, 0.0]]  # written to once


def test_an_object_that_grows_is_given_again_as_it_was() -> None:
    class Past:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Attends(nn.Module):
        def forward(self, x: Tensor, past: Past) -> Tensor:
            past.keys.append(x)
            return torch.cat(past.keys).log()

    past, model = Past(), nn.Sequential(nn.Identity())
    model[0] = Attends()
    root = Apply(lambda x, past: model[0](x, past))
    root.inner = model[0]
    with guard(root, action="record") as g:
        root(ones(), past)
        root(ones() * 0, past)
    assert len(past.keys) == 2
    assert [(str(f.site), f.inputs[0].shape) for f in g.findings] == [("inner/log#1", (4, 4))]


def test_a_cache_of_transformers_is_given_again_as_it_was() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad(), guard(model, action="record") as g:
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = NAN
        model(torch.tensor([[4]]), past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 4
    assert [(f.kind, str(f.site)) for f in g.findings] == [("parameter", "transformer.h.0.mlp.c_fc.weight")]


# -- where it cannot be the same


def unrepeated(model: nn.Module, *inputs: Any) -> str:
    with guard(model, action="record") as g:
        for one in inputs:
            run(model, one)
    (finding,) = g.findings
    assert (finding.kind, finding.site.path, finding.phase) == ("module", "1", "forward")
    assert "thorough=True" in str(finding)
    return repr(finding)


def test_a_generator_that_was_given_has_moved_on() -> None:
    class Drawn(nn.Sequential):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return self[1](self[0](x) + 0 * torch.rand(4, generator=generator))

    model = Drawn(nn.Identity(), Apply(lambda x: x.log()))
    assert unrepeated(model, (ones() * 0, torch.Generator())) == (
        "<Finding: '1#0' returned -Inf; what made it could not be found, because it was given a Generator, which may "
        "have moved on.>"
    )


def test_what_python_remembers_elsewhere_is_not_repeated() -> None:
    calls: list[int] = []
    model = nn.Sequential(nn.Identity(), Apply(lambda x: calls.append(1) or (x / 0 if len(calls) == 1 else x)))
    assert "'1#0' returned +Inf; what made it could not be found, because it was not there" in unrepeated(model, ones())


def test_an_input_that_is_overwritten_for_the_first_time_after_many_runs_is_said() -> None:
    model = nn.Sequential(Apply(lambda x: x.sub_(x) if x[0, 0] == 2 else x), Apply(lambda x: x.log()))
    said = unrepeated(model, *[ones()] * 5, ones() * 2)
    assert "because an input of shape (2, 4) was written to since" in said


def test_an_error_in_the_repetition_is_said() -> None:
    calls: list[int] = []

    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("not twice")
        return x / 0

    model = nn.Sequential(nn.Identity(), Apply(fails))
    assert "because repeating the pass raised KeyError: 'not twice'" in unrepeated(model, ones())


# -- others are there too


def test_other_sessions_edit_a_repeated_run_as_the_first_and_record_it_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), Apply(lambda x: x.log()), nn.Linear(4, 4))
    calls: list[int] = []

    def edit(value: Tensor, site: Any) -> Tensor:
        calls.append(site.call)
        return value * 0 if site.call == 1 else value.abs() + 1

    with th.edit(model, {"1": edit, "2/log:input": lambda value: value}), th.capture(model, "2", "2/log") as rec:
        with guard(model, action="record") as g, th.capture(model, "3") as later:
            for _ in range(3):
                model(ones())
    assert [(str(f.site), f.run) for f in g.findings] == [("2/log#1", 1)]
    assert [len(rec.all("2")), len(rec.all("2/log")), len(later.all("3"))] == [3, 3, 3]
    assert calls == [0, 1, 1, 2]  # the run in the middle was repeated, and edited as such


def test_edits_of_the_models_input_are_made_once() -> None:
    model = nn.Sequential(Apply(lambda x: x.log()))
    x = torch.tensor([[4.0, 1.0]])
    for edit_first in (True, False):
        edit, g = th.edit(model, {":input": lambda value: value - 1}), guard(model, action="record")
        first, second = (edit, g) if edit_first else (g, edit)
        with first, second:
            model(x)
        assert [(s.min, s.max) for s in g.findings[0].inputs] == [(0.0, 3.0)]


def test_two_guards_find_the_same_once_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x / 0))
    for one in (False, True):
        for other in (False, True):
            with guard(model, action="record", thorough=one) as g, guard(model, action="record", thorough=other) as h:
                model(ones())
                model(ones())
            assert [(str(f.site), f.times) for f in (*g.findings, *h.findings)] == [("1/div#0", 2)] * 2


def test_hooks_on_parameters_and_their_gradients_see_one_backward_pass() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    seen: list[str] = []
    weight = model[2].weight
    weight.register_hook(lambda grad: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    weight.grad = torch.ones_like(weight)
    before = weight.grad
    with guard(model, action="record") as g, th.capture(model, "2.weight:grad", "2:grad") as rec:
        model(ones()).sum().backward()
    assert [str(f.site) for f in g.findings] == ["1/sqrt#0:grad_input"]
    assert seen == ["hook", "accumulated"]
    assert weight.grad is before
    assert torch.equal(weight.grad, 1 + rec["2.weight:grad"])
    assert len(rec.all("2:grad")) == 1


def test_the_models_own_output_is_recorded_once_too() -> None:
    # Its hook comes when nobody listens any more.
    model = nn.Sequential(nn.Linear(2, 2), Apply(lambda x: torch.log(x - 100)))
    with th.capture(model, "(model)", "0") as rec, guard(model, action="record") as g:
        model(torch.ones(1, 2))
    assert len(g.findings) == 1
    assert [(record.site.shown, record.call) for record in rec.records()] == [("0", 0), ("(model)", 0)]
