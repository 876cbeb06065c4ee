"""The stages of a pipeline on two ranks, against a single process that takes the same microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import Net, batch, loss, net
from tests.distributed.pipelines import CHUNKS, KINDS, NORM, VALUE, stage_of
from tests.distributed.ranks import Results
from tests.distributed.test_watching import by_hand

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.pipelines")


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def accumulated(model: Net) -> Net:
    for x in batch().chunk(CHUNKS):
        loss(model(x)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= CHUNKS
    return model


def grads(model: Net, rank: int) -> dict[str, Tensor]:
    return {name: p.grad for name, p in stage_of(model, rank).named_parameters() if p.grad is not None}


def stages(found: list[Any]) -> Iterator[tuple[int, Any]]:
    return enumerate(found)


@pytest.mark.shows("Pipelines: captures and gradients of a stage")
@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_of_a_pipeline_are_hooked_one_by_one(found: Results, kind: str) -> None:
    for rank, captured in stages(found["captured"]):
        model, values, gradients = net(), [], []
        module = model.blocks[0].a if rank == 0 else model.head
        weights: list[Tensor] = []

        def keep(_: Any, __: Any, output: Tensor, values: Any = values, gradients: Any = gradients) -> None:
            values.append(output.detach().clone())
            output.register_hook(lambda grad: gradients.append(grad.clone()))

        module.register_forward_hook(keep)
        module.weight.register_hook(lambda grad, weights=weights: weights.append(grad.clone()))
        accumulated(model)
        sites, after = captured[kind]
        close(sites, [values, gradients, weights])  # a call for each microbatch
        close(after, grads(model, rank))


@pytest.mark.shows("Pipelines: edits")
def test_edits_in_the_stages_are_those_of_a_single_process(found: Results) -> None:
    model = net()

    def doubled(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: 2 * grad)

    outputs: list[list[Tensor]] = [[], []]
    model.blocks[0].a.register_forward_hook(lambda _, __, output: output + torch.arange(10.0))
    model.blocks[0].b.register_forward_hook(doubled)
    model.blocks[1].a.register_forward_hook(lambda _, __, output: output.clamp(-1, 1))
    model.head.weight.register_hook(lambda grad: grad / 2)
    model.blocks[0].register_forward_hook(lambda _, __, output: outputs[0].append(output.detach()))
    model.head.register_forward_hook(lambda _, __, output: outputs[1].append(output.detach()))
    accumulated(model)
    for rank, (output, after) in stages(found["edited"]):
        close(output, torch.cat(outputs[rank]))
        close(after, grads(model, rank))


@pytest.mark.shows("Pipelines: clipping, by the norm over all stages")
def test_gradients_are_limited_once_over_all_microbatches_and_stages(found: Results) -> None:
    clamped, shortened = accumulated(net()), accumulated(net())
    nn.utils.clip_grad_value_(clamped.parameters(), VALUE)
    assert nn.utils.clip_grad_norm_(shortened.parameters(), NORM) > 2 * NORM
    for rank, after in stages(found["clipped"]):
        close(after["value"], grads(clamped, rank))
        close(after["norm"], grads(shortened, rank))
        for name in ("value", "norm"):
            close(after[f"{name} afterwards"], grads(accumulated(net()), rank))


def test_the_limit_comes_before_the_optimizers_step(found: Results) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        accumulated(model)
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
    for rank, after in stages(found["trained"]):
        close(after, {name: p.detach() for name, p in stage_of(model, rank).named_parameters()})


@pytest.mark.shows("Pipelines: one rank alone that clips by the norm", error="SessionError")
def test_one_rank_alone_that_clips_is_told_so(found: Results) -> None:
    (said, hooks), other = found["one_rank_clips"]
    assert other == "no error"
    assert said.startswith("the limit on gradients: it is shared with other ranks, and rank 1 has nothing open")
    assert not hooks


@pytest.mark.shows("Pipelines: watch for 100 steps")
def test_a_hundred_steps_have_the_norms_of_a_single_process(found: Results) -> None:
    expected = by_hand(100)
    names = {name: whole for whole in expected[0] for name in [whole]}
    for rank, history in stages(found["watched"]):
        assert [step for step, _ in history] == list(range(0, 100, 10))
        prefixes = {"": "blocks.0."} if rank == 0 else {"0.": "blocks.1.", "1.": "head."}
        for step, sites in history:
            own = {w: s + w.removeprefix(p) for w in names for s, p in prefixes.items() if w.startswith(p)}
            assert len(own) == (4 if rank == 0 else 6)
            for whole, name in own.items():
                norm, grad_norm, ratio = expected[step][whole]
                assert sites[name]["norm"] == pytest.approx(norm, rel=1e-4), name
                assert sites[name]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3), name
                assert sites[name]["update_ratio"] == pytest.approx(ratio, rel=1e-3), name
    a = net().blocks[0].a(batch()).detach()  # over all microbatches
    sites = found["watched"][0][0][1]
    for name, value in (("mean", a.mean()), ("std", a.std(correction=0)), ("min", a.min()), ("norm", a.norm())):
        assert sites["a"][name] == pytest.approx(value.item(), rel=1e-4), name


@pytest.mark.shows("Pipelines: guard")
def test_a_bad_weight_is_named_where_it_is_and_the_other_stage_says_that_it_was_given_it(found: Results) -> None:
    first, second = found["guarded"]
    assert first["blocks.0.b.weight"] == [("parameter", "b.weight", "forward")]
    assert second["blocks.0.b.weight"] == [("input", "#0:input", "forward")]
    for site, name in (("blocks.1.b.weight", "0.b.weight"), ("head.weight", "1.weight")):
        assert second[site] == [("parameter", name, "forward")]
        assert first[site] == [("loss", "#0:grad", "backward")]  # what came back from behind its output


def test_nothing_is_found_where_nothing_is_wrong(found: Results) -> None:
    assert found["sound"] == [[], []]


@pytest.mark.shows("Pipelines: one rank alone that captures")
def test_one_rank_alone_may_look_and_nobody_waits(found: Results) -> None:
    model = accumulated(net())
    for rank, turns in stages(found["one_rank_alone"]):
        assert [count > 0 for count, _ in turns] == [rank == 0, rank == 1]
        for _, after in turns:
            close(after, grads(model, rank))
