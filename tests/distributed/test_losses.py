"""Losses on kept values and tensor parallelism on two ranks, against a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.distributed.losses import INSIDE, OUTSIDE, SHARDED
from tests.distributed.models import batch, loss, net
from tests.distributed.ranks import Results
from tests.distributed.test_watching import by_hand, check
from torchhook import edits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.losses")


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- losses on kept values --------------------------------------------------------------------------------


@pytest.mark.shows("Sharded training: a loss on a value that FSDP frees", error="SessionError")
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("site", INSIDE)
def test_a_loss_whose_gradients_fsdp_would_lose_is_refused(found: Results, kind: str, site: str) -> None:
    for said in found[f"alone_{kind}"]:
        assert f"{site!r}: a loss on this value alone would lose the gradients" in said[site]
        assert ("'blocks.0'" if site.startswith("blocks") else "the model") in said[site]


@pytest.mark.shows("Sharded training: a loss on a captured value")
@pytest.mark.parametrize("site", OUTSIDE)
def test_a_loss_that_comes_through_an_output_of_fsdp_gives_the_gradients_of_a_single_process(
    found: Results, site: str
) -> None:
    model = net()
    with th.capture(model, site, keep="live") as rec:
        model(batch().requires_grad_())
    (rec[site].pow(2).sum() / 2).backward()  # FSDP takes the mean over the ranks
    for after in found["alone_fsdp2"]:
        close(after[site], grads(model))


@pytest.mark.parametrize("site", OUTSIDE)
def test_a_loss_that_comes_through_an_output_of_fsdp1_is_not_refused(found: Results, site: str) -> None:
    assert [after[site] for after in found["alone_fsdp1"]] == ["no error"] * 2


def test_hooks_that_stay_refuse_such_a_loss_too(found: Results) -> None:
    model = net()
    (model.blocks[0](batch()).pow(2).sum() / 2).backward()
    for after in found["attached"]:
        assert "'blocks.0.a': a loss on this value alone would lose the gradients" in after["blocks.0.a"]
        close(after["blocks.0"], grads(model))


WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp1": "FullyShardedDataParallel"}


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_loss_on_what_the_forward_pass_ended_at_is_right_or_refused(found: Results, kind: str, attach: bool) -> None:
    model = net()
    output = model.blocks[0](batch())
    loss(output).backward()
    for ranks, part in zip(found[f"ended_early_{kind}"], output.detach().chunk(2), strict=True):
        value, after = ranks[attach]
        close(value, part)
        if kind == "fsdp2":
            close(after, grads(model))
        else:
            assert "stop=True" in after
            assert WRAPPERS[kind] in after


def test_a_wrapper_around_a_model_that_ends_early_gives_the_gradients_of_a_single_process(found: Results) -> None:
    model = net()
    loss(model.blocks[0](batch())).backward()
    for after in found["ended_early_inside"]:
        close(after, grads(model))


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("site", ["blocks.0.a", "blocks.0.b:input", "blocks.0"])
def test_a_loss_that_is_added_to_one_on_the_output_is_right(found: Results, kind: str, site: str) -> None:
    model = net()
    with th.capture(model, site, keep="live") as rec:
        output = model(batch())
    (loss(output) + loss(rec[site])).backward()
    for after in found[f"added_{kind}"]:
        close(after[site], grads(model))


# -- tensor parallelism -----------------------------------------------------------------------------------


@pytest.mark.shows("Tensor parallel: captures and gradients")
def test_tensor_parallel_values_and_gradients_are_whole_when_gathered(found: Results) -> None:
    model = net()
    with th.capture(model, "blocks.0.a", "blocks.0", "blocks.0.a:grad", "blocks.0.a.weight:grad") as rec:
        loss(model(batch())).backward()
    for captured, after in found["tensor_parallel"]:
        close(captured, {key: rec[key] for key in rec})
        close(after, grads(model))


@pytest.mark.shows("Tensor parallel: edits")
def test_a_plain_vector_is_added_to_a_dtensor(found: Results) -> None:
    model = net()
    with th.edit(model, {"blocks.0.a": edits.add(torch.arange(10.0)), "blocks.1.a": edits.zero()}):
        expected = model(batch()).detach()
    for output in found["tensor_parallel_edits"]:
        close(output, expected)


@pytest.mark.shows("Tensor parallel: clipping")
def test_the_norm_of_tensor_parallel_gradients_is_that_of_the_whole(found: Results) -> None:
    model = net()
    loss(model(batch())).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for after in found["tensor_parallel_clip"]:
        close(after, grads(model))


@pytest.mark.shows("Tensor parallel: watch")
def test_tensor_parallel_models_are_watched_as_a_whole(found: Results) -> None:
    a = net().blocks[0].a(batch()).detach()
    for history in found["tensor_parallel_watch"]:
        check(history, by_hand(100))
        sites = history[0][1]
        for name, value in (("mean", a.mean()), ("std", a.std(correction=0)), ("min", a.min()), ("norm", a.norm())):
            assert sites["blocks.0.a"][name] == pytest.approx(value.item(), rel=1e-4), name


@pytest.mark.shows("Tensor parallel: guard")
def test_a_bad_part_of_a_weight_is_named(found: Results) -> None:
    first, second = found["tensor_parallel_guard"]
    assert first == [("parameter", "blocks.1.b.weight")]
    assert len(second) == 1  # it is given what the other rank made of it


@pytest.mark.shows("Tensor parallel: edits")
def test_edited_gradients_of_dtensors_are_those_of_a_single_process(found: Results) -> None:
    model = net()
    model.blocks[0].a.register_forward_hook(lambda _, __, output: output.register_hook(lambda grad: 3 * grad) and None)
    model.blocks[1].a.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    loss(model(batch())).backward()
    for after in found["tensor_parallel_edits_of_gradients"]:
        close(after, grads(model))


@pytest.mark.shows("Tensor parallel: one rank alone that captures")
def test_one_rank_alone_captures_its_part_and_nobody_waits(found: Results) -> None:
    model = net()
    a: list[Tensor] = []
    model.blocks[0].a.register_forward_hook(lambda _, __, output: output.retain_grad() or a.append(output))
    output = model(batch())
    loss(output).backward()
    captured, after = found["tensor_parallel_one_rank"]
    close(after, grads(model))
    assert a[0].grad is not None
    close(captured["blocks.0.a"], a[0].detach()[:, :5])
    close(captured["blocks.0.a:grad"], a[0].grad[:, :5])
    close(captured["blocks.0.a.weight:grad"], grads(model)["blocks.0.a.weight"][:5])
    close(captured["head"], output.detach())


def test_one_rank_alone_keeps_its_summand_of_a_partial_value(found: Results) -> None:
    captured, other = found["partial_one_rank"]
    assert other == "no session"
    assert captured == {"norm.weight:grad": (True, (6,)), "down/linear": (True, (2, 4, 6))}


@pytest.mark.shows("Tensor parallel: diff and report of this rank's part")
def test_what_is_compared_and_reported_of_this_ranks_part_alone_is_said(found: Results) -> None:
    a = net().blocks[0].a(batch()).detach()
    for rank, ((mine, other, same), notes, numbers) in enumerate(found["compared_and_reported"]):
        for result in (mine, other):
            row = result["blocks.0.a"]
            assert (row.status, row.elements) == (("same", "differs")[rank], 40)
            assert row.mismatches == (0, 8)[rank]
            assert "this rank's part" in row.note
            assert "record with gather='full'" in str(result)
            assert "this rank's part" not in result["head"].note
        assert same.ok
        part = a.chunk(2, dim=1)[rank]
        assert numbers.elements == 40
        assert numbers.mean == pytest.approx(part.mean().item(), rel=1e-5)
        (note,) = [note for note in notes if "rank" in note]
        assert note.startswith("Numbers and pictures of 'blocks.0.a', 'blocks.1.a', 'blocks.0.a.weight'")
        assert "those of this rank's part" in note


def test_a_rank_saves_its_part_and_says_so(found: Results) -> None:
    expected = net().blocks[0].a(batch()).detach()
    parts = found["saved_parts"]
    close(torch.cat([part for part, _ in parts], dim=1), expected)
    for _, said in parts:
        assert len(said) == 1
        assert "saved as this rank's part of it, (8, 5)" in said[0]
