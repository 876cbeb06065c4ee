"""A call that activation checkpointing runs again is the same call: the same number, edits and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torchhook as th
from tests.oracle import in_threads
from torchhook import edits
from torchhook._core import recompute
from torchhook._core.recompute import Segments
from torchhook._recording.address import Site
from torchhook._torch import bare_segments, graph_task
from torchhook.errors import RecomputeWarning, SessionError
from torchhook.types import Recording

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def leaf(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


class Checkpointed(nn.Module):
    """A checkpointed method that calls one layer once or several times."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.tanh, self.times, self.reentrant = nn.Linear(3, 3), nn.Tanh(), times, reentrant

    def segment(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.tanh(self.layer(x))
        return x

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.segment, x, use_reentrant=self.reentrant)


Layer = Callable[[Tensor], Tensor]


def assert_weight_gradient(model: Any, score: Callable[[Layer], Tensor]) -> None:
    """The gradient of the layer is that of ``score``, which is written by hand for a layer with the same weights."""
    weight, bias = leaf(model.layer.weight.detach()), model.layer.bias.detach()
    score(lambda x: F.linear(x, weight, bias)).backward()
    torch.testing.assert_close(model.layer.weight.grad, weight.grad)


def chain(layer: Layer, factors: list[float]) -> Tensor:
    """What a model computes that calls its layer as often as there are factors, with the outputs scaled by them."""
    x = X
    for factor in factors:
        x = torch.tanh(layer(x) * factor)
    return x.sum()


either = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])

# -- the number of a call -----------------------------------------------------------------------------------------


@pytest.mark.shows("Checkpointing: edits of one call of several")
@either
@pytest.mark.parametrize("call", [0, 1, 2])
def test_one_call_of_several_in_a_segment_is_edited_again_alone(reentrant: bool, call: int) -> None:
    model = Checkpointed(reentrant, times=3)
    with th.edit(model, {f"layer#{call}": edits.scale(3.0)}):
        model(leaf()).sum().backward()
    assert_weight_gradient(model, lambda layer: chain(layer, [3.0 if k == call else 1.0 for k in range(3)]))


@pytest.mark.shows("Checkpointing: edits of one call of several")
@either
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_backward_passes_in_any_order_find_their_own_calls(reentrant: bool, order: tuple[int, ...]) -> None:
    model, seen = Checkpointed(reentrant, times=2), []

    def scale_by_call(value: Tensor, site: Site) -> Tensor:
        seen.append(site.call)
        return value * (1 + site.call)

    with th.edit(model, {"layer": scale_by_call}):
        losses = [model(leaf(X + k)).sum() for k in range(3)]
        assert seen == [0, 1, 2, 3, 4, 5]
        for k in order:
            losses[k].backward()
    assert seen[6:] == [call for k in order for call in (2 * k, 2 * k + 1)]

    def score(layer: Layer) -> Tensor:
        inner = [torch.tanh(layer(X + k) * (1 + 2 * k)) for k in range(3)]
        return torch.stack([torch.tanh(layer(x) * (2 + 2 * k)) for k, x in enumerate(inner)]).sum()

    assert_weight_gradient(model, score)


def test_a_second_backward_pass_through_a_kept_graph_finds_the_same_calls() -> None:
    model = Checkpointed(reentrant=False)
    with th.edit(model, {"layer#1": edits.scale(3.0)}):
        loss = model(leaf()).sum() + model(leaf(X + 1)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_weight_gradient(model, lambda layer: 2 * (torch.tanh(layer(X)).sum() + torch.tanh(3 * layer(X + 1)).sum()))


@either
def test_many_steps_keep_their_numbers_although_memory_is_used_again(reentrant: bool) -> None:
    model, seen = Checkpointed(reentrant, times=2), []
    with th.edit(model, {"layer": lambda value, site: seen.append(site.call)}):
        for _ in range(100):
            model(leaf()).sum().backward()
    assert seen == [call for step in range(100) for call in (2 * step, 2 * step + 1) * 2]


@either
def test_the_gradients_of_several_calls_in_a_segment_have_their_own_numbers(reentrant: bool) -> None:
    model = Checkpointed(reentrant, times=3)
    with th.capture(model, "layer:grad") as rec:
        model(leaf()).sum().backward()
    assert_gradients_of_calls(rec, model, times=3)


def assert_gradients_of_calls(rec: Recording, model: Any, times: int) -> None:
    """There is one gradient of each call, the right one: by hand, for a model that only calls its layer and a tanh."""
    held, x = [], X
    for _ in range(times):
        held.append(F.linear(x, model.layer.weight, model.layer.bias))
        x = torch.tanh(held[-1])
    found = sorted(rec.records("layer:grad"), key=lambda record: record.call)
    assert [record.call for record in found] == list(range(times))
    torch.testing.assert_close([record.value for record in found], list(torch.autograd.grad(x.sum(), held)))


# An inner reentrant one sees no gradients while an outer one runs for the first time.
may_warn = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
nestings = pytest.mark.parametrize(
    ("outer", "inner"), [(outer, inner) for outer in (False, True) for inner in (False, True)]
)


class Nested(nn.Module):
    """A checkpointed method whose middle is checkpointed too: four calls of one layer."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.inner, self.outer = Checkpointed(inner, times=2), outer
        self.layer = self.inner.layer

    def segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.inner(torch.tanh(self.layer(x)))))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.segment, x, use_reentrant=self.outer)


@pytest.mark.shows("Checkpointing: one inside another")
@may_warn
@nestings
def test_segments_inside_a_segment_find_their_own_calls(outer: bool, inner: bool) -> None:
    model, seen = Nested(outer, inner), []
    with th.edit(model, {"layer": lambda value, site: seen.append(site.call) or value * (1 + site.call)}):
        model(leaf()).sum().backward()
    assert seen == [0, 1, 2, 3, *(0, 1, 2, 3), *(1, 2)]
    assert_weight_gradient(model, lambda layer: chain(layer, [1.0, 2.0, 3.0, 4.0]))


@pytest.mark.shows("Checkpointing: one inside another")
@may_warn
@nestings
def test_the_gradients_of_segments_inside_a_segment_have_their_own_numbers(outer: bool, inner: bool) -> None:
    model = Nested(outer, inner)
    with th.capture(model, "layer:grad", "layer") as rec:
        model(leaf()).sum().backward()
    assert_gradients_of_calls(rec, model, times=4)
    assert len(rec.all("layer")) == 4


@pytest.mark.shows("Checkpointing: checkpoint_sequential")
def test_every_segment_of_a_checkpointed_sequence_is_edited_again() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.parts = [self.layer, nn.Tanh()] * 4

        def forward(self, x: Tensor) -> Any:
            return checkpoint_sequential(self.parts, 4, x, use_reentrant=False)

    model = Sequence()
    with th.edit(model, {"layer": lambda value, site: value * (1 + site.call)}):
        model(leaf()).sum().backward()
    assert_weight_gradient(model, lambda layer: chain(layer, [1.0, 2.0, 3.0, 4.0]))


# -- what a recomputed call sees ----------------------------------------------------------------------------------


@pytest.mark.shows("Checkpointing: edits that draw random numbers")
@either
def test_noise_is_the_same_when_it_is_made_again(reentrant: bool) -> None:
    model, noisy = Checkpointed(reentrant), []
    model.tanh.register_forward_pre_hook(lambda module, args: noisy.append(args[0].detach().clone()))
    with th.edit(model, {"layer": edits.noise(1.0)}):
        model(leaf()).sum().backward()
    assert torch.equal(noisy[0], noisy[-1])
    torch.testing.assert_close(model.layer.weight.grad, (1 - noisy[0].tanh() ** 2).T @ X)


@pytest.mark.shows("Checkpointing: a backward pass in another thread")
@either
def test_edits_are_made_again_when_the_backward_pass_runs_in_another_thread(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    with th.edit(model, {"layer": edits.scale(3.0)}):
        in_threads(model(leaf()).sum().backward)
    assert_weight_gradient(model, lambda layer: torch.tanh(3 * layer(X)).sum())


@either
def test_recomputed_calls_are_counted_for_values_and_gradients_and_kept_once(reentrant: bool) -> None:
    model = Checkpointed(reentrant, times=2)
    with th.capture(model, "layer", "layer:input", "layer:grad") as rec:
        model(leaf()).sum().backward()
    assert [len(rec.all(site)) for site in ("layer", "layer:input", "layer:grad")] == [2, 2, 2]
    # The recomputation of the newer kind may end before the last layer: nothing after it is needed.
    assert rec.recomputed == {"layer": 2, "layer:input": 2, "layer:grad": 2}


# -- segments -----------------------------------------------------------------------------------------------------


def test_a_backward_pass_has_a_number_and_other_code_has_none() -> None:
    inside: list[int] = []
    x = leaf()
    (y := x * 2).register_hook(lambda grad: inside.append(graph_task()))
    assert graph_task() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert graph_task() == -1
    assert -1 not in inside
    assert len(set(inside)) == 2


def test_a_call_outside_every_checkpoint_belongs_to_no_segment() -> None:
    segments = Segments()
    segments.note(0)
    with torch.no_grad():
        segments.note(1)
    with torch.autograd.graph.save_on_cpu():
        segments.note(2)
    assert not segments.is_known()
    assert not segments._calls


@either
def test_a_segment_is_known_again_by_the_calls_that_were_noted_in_it(reentrant: bool) -> None:
    segments, noted, again = Segments(), itertools.count(), []

    def function(x: Tensor) -> Tensor:
        for _ in range(2):
            if graph_task() == -1:
                segments.note(next(noted))
            else:
                assert segments.is_known()
                again.append(segments.call_again(4))
        return x.sin()

    losses = [checkpoint(function, leaf(), use_reentrant=reentrant).sum() for _ in range(2)]
    assert not segments.is_known()
    for loss in losses:
        loss.backward()
    assert again == [0, 1, 2, 3]


def test_calls_that_no_segment_is_known_for_are_taken_to_run_again_in_reverse() -> None:
    segments, again = Segments(), []
    (y := leaf() * 2).register_hook(lambda grad: again.extend(segments.call_again(3) for _ in range(4)))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert again == [2, 1, 0, 0] * 2


def test_only_the_newest_segments_are_remembered_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_REMEMBERED", 3)
    segments, noted, known = Segments(), itertools.count(), []

    def function(x: Tensor) -> Tensor:
        if graph_task() == -1:
            segments.note(next(noted))
        else:
            known.append(segments.is_known())
        return x.sin()

    older, old, *newest = [checkpoint(function, leaf(), use_reentrant=False) for _ in range(5)]
    for output in (older, old):
        with pytest.raises(SessionError, match="more than 3 checkpointed segments"):
            output.sum().backward()
    for output in newest:
        output.sum().backward()
    assert known == [True, True, True]


def test_a_bare_segment_is_a_checkpointed_function_outside_of_the_modules_that_it_calls() -> None:
    found: dict[str, int] = {}

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.setdefault("module", len(bare_segments()))
            return x.sin()

    def function(x: Tensor) -> Tensor:
        found.setdefault("function", len(bare_segments()))
        return Inside()(x)

    checkpoint(function, leaf(), use_reentrant=False)
    found["outside"] = len(bare_segments())
    assert found == {"function": 1, "module": 0, "outside": 0}


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_edit_that_ends_before_a_checkpointed_part_is_recomputed_is_said(reentrant: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)

    def run() -> Tensor:
        out: Tensor = checkpoint(model, x, use_reentrant=reentrant)
        return out

    with pytest.warns(RecomputeWarning, match="'1': edited in a checkpointed part"):
        with th.edit(model, {"1": edits.scale(0.5)}):
            kept = run()
    del kept
    with th.edit(model, {"1": edits.scale(0.5)}):
        run().sum().backward()  # in time
    with th.edit(model, {"1": edits.scale(0.5)}):
        run()  # nobody can ask for gradients any more
    kept = []
    with th.capture(model, "1"):
        kept.append(run())  # nothing was edited
    with torch.no_grad(), th.edit(model, {"1": edits.scale(0.5)}):
        kept.append(run())
