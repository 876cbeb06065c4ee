"""Transforms of a capture leave out the padding of the call that runs. The oracle is the whole value, cut by hand."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.token_data import LENGTHS, MODELS, by_hand, llama, padded
from torchhook import transforms
from torchhook.errors import TransformError


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_the_last_token_is_no_padding(name: str, side: str) -> None:
    make, site, _ = MODELS[name]
    model, data = make(), padded(side)
    value = by_hand(model, [site], [data])[site][0]
    ends = [n - 1 if side == "right" else 10 for n in LENGTHS]
    wanted = torch.stack([value[i, at] for i, at in enumerate(ends)])
    with torch.no_grad(), th.capture(model, site, transform=transforms.tokens("last")) as rec:
        model(**data)
    assert torch.equal(rec[site], wanted)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        _, rec = th.run(model, **data, capture=site, transform=transforms.compose(transforms.tokens("last")))
        assert torch.equal(rec[site], wanted)
        _, rec = th.run(model, **data, capture=site, transform=transforms.tokens("last", masked=False))
        assert torch.equal(rec[site], value[:, -1])
        plain = {**data, "attention_mask": torch.ones_like(data["attention_mask"])}
        _, rec = th.run(model, **plain, capture=site, transform=transforms.tokens("last"))
        assert torch.equal(rec[site], by_hand(model, [site], [plain])[site][0][:, -1])


def test_pools_and_statistics_leave_padding_out_too() -> None:
    model, data, site = llama(), padded(), "model.layers.0"
    value = by_hand(model, [site], [data])[site][0]
    with torch.no_grad():
        _, rec = th.run(model, **data, capture=site, transform=transforms.pool("mean"))
    wanted = torch.stack([value[i, :n].mean(0) for i, n in enumerate(LENGTHS)])
    assert torch.allclose(rec[site], wanted, atol=1e-6)


def test_every_module_of_a_model_can_be_pooled_whatever_its_values_are() -> None:
    model, data = llama(), padded()
    with torch.no_grad(), th.capture(model, "**", transform=transforms.pool("mean")) as rec:
        model(**data)
    assert len(rec) > 20


@pytest.mark.parametrize("side", ["left", "right"])
def test_steps_of_a_generation_with_a_cache_have_their_last_tokens(side: str) -> None:
    model, data, site = llama(), padded(side), "model.layers.0"
    with th.capture(model, site) as whole:
        model.generate(**data, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=63)
    with th.capture(model, site, transform=transforms.tokens("last")) as rec:
        model.generate(**data, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=63)
    first, *others = rec.all(site)
    values = whole.all(site)
    ends = [n - 1 if side == "right" else 10 for n in LENGTHS]
    assert torch.equal(first, torch.stack([values[0][i, at] for i, at in enumerate(ends)]))
    for found, value in zip(others, values[1:], strict=True):
        assert torch.equal(found, value[:, -1])


def test_a_prompt_in_parts_is_masked_by_the_end_of_the_mask() -> None:
    model, site = llama(), "model.layers.0"
    long = [i for i, n in enumerate(LENGTHS) if n > 6]
    ids, mask = (part[long] for part in padded().values())
    last = transforms.tokens("last")
    with torch.no_grad(), th.capture(model, site) as whole, th.capture(model, site, transform=last) as rec:
        out = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        model(ids[:, 6:], attention_mask=mask, past_key_values=out.past_key_values)
    second = whole[site, 1]
    assert torch.equal(rec[site, 1], torch.stack([second[i, LENGTHS[row] - 7] for i, row in enumerate(long)]))


def test_a_row_without_any_token_is_told() -> None:
    model, data = llama(), padded("left")
    data["attention_mask"][0] = 0
    with torch.no_grad(), pytest.raises(TransformError, match="row 0 of the batch has no position"):
        th.run(model, **data, capture="model.layers.0", transform=transforms.tokens("last"))


class Parts(nn.Module):
    """Halves the time axis."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.shorter, self.table = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.table(torch.zeros(1, x.shape[1], 3))
        return self.shorter(self.whole(x)[:, ::2])


def test_a_layer_that_changes_the_time_axis_says_that_nobody_knows() -> None:
    model, x = Parts(), torch.randn(3, 8, 2)
    mask = torch.arange(8) < torch.tensor([[8], [3], [5]])
    with pytest.raises(TransformError, match="changes the time axis"):
        th.run(model, x, attention_mask=mask, capture="shorter", transform=transforms.tokens("last"))
    _, rec = th.run(model, x, attention_mask=mask, capture=["whole", "table"], transform=transforms.tokens("last"))
    assert torch.equal(rec["whole"], torch.stack([x[0, 7], x[1, 2], x[2, 4]]))
    assert rec["table"].shape == (1, 3)
    cut = transforms.compose(transforms.narrow(1), transforms.tokens("last"))
    _, rec = th.run(model, x, attention_mask=mask, capture=["whole", "table"], transform=cut)
    assert torch.equal(rec["whole"], torch.stack([x[0, 7], x[1, 2], x[2, 4]]))
    own = transforms.tokens("last", lengths=[4, 2, 3])
    _, rec = th.run(model, x, attention_mask=mask, capture="shorter", transform=own)
    assert torch.equal(rec["shorter"], torch.stack([x[0, 6], x[1, 2], x[2, 4]]))


def test_a_part_that_is_called_by_itself_has_no_padding_of_an_earlier_call() -> None:
    model, x = Parts(), torch.randn(3, 8, 2)
    mask = torch.arange(8) < torch.tensor([[8], [3], [5]])
    with th.capture(model, "whole", transform=transforms.tokens("last")) as rec:
        model(x, attention_mask=mask)
        model.whole(x)
        model(x)
    assert torch.equal(rec["whole", 0][1], x[1, 2])
    assert torch.equal(rec["whole", 1], x[:, -1])
    assert torch.equal(rec["whole", 2], x[:, -1])


def test_the_output_of_the_model_itself_belongs_to_the_call() -> None:
    class Same(Parts):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.whole(x)

    model, x = Same(), torch.randn(2, 4, 2)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    sites = ["(model)", "whole", "whole:input"]
    _, rec = th.run(model, x, attention_mask=mask, capture=sites, transform=transforms.tokens("last"))
    assert all(torch.equal(rec[site], torch.stack([x[0, 1], x[1, 3]])) for site in sites)


class Guided(nn.Module):
    """Calls itself, as classifier-free guidance does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        if other is not None:
            with contextlib.suppress(ValueError):
                x = x - self(other, attention_mask=torch.ones_like(other)).mean()
        return self.last(x)


@pytest.mark.parametrize("inner_fails", [False, True])
def test_a_model_that_calls_itself_has_the_padding_of_each_call(inner_fails: bool) -> None:
    torch.manual_seed(0)
    model, ids, other = Guided(), torch.randint(1, 20, (3, 5)), torch.randint(1, 20, (3, 4))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    if inner_fails:

        def fails(module: nn.Module, args: Any) -> None:
            if args[0].shape[1] == 4:
                raise ValueError("too short")

        model.embedding.register_forward_pre_hook(fails)
    whole: list[Tensor] = []
    handle = model.last.register_forward_hook(lambda m, args, output: whole.append(output.detach().clone()))
    model(ids, attention_mask=mask, other=other)
    handle.remove()
    with th.capture(model, "last", transform=transforms.pool("mean")) as rec:
        for _ in range(2):
            model(ids, attention_mask=mask, other=other)
    pooled = (whole[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = [pooled] if inner_fails else [whole[0].mean(1), pooled]
    found = rec.all("last")
    assert len(found) == 2 * len(expected)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, 2 * expected, strict=True))


def test_a_call_that_raised_leaves_no_padding_behind() -> None:
    class Fails(Parts):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            super().forward(x)
            raise KeyError("late")

    model, x = Fails(), torch.randn(2, 4, 2)
    with th.capture(model, "whole", transform=transforms.tokens("last")) as rec:
        with pytest.raises(KeyError):
            model(x, attention_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
        model.whole(x)
    assert torch.equal(rec["whole", 0][0], x[0, 1])
    assert torch.equal(rec["whole", 1], x[:, -1])


def test_threads_have_each_their_own_mask() -> None:
    model, x = Parts(), torch.randn(2, 4, 2)
    masks = [torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])]
    go = threading.Barrier(2)

    class Slow(Parts):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            go.wait(10)
            return super().forward(x)

    model = Slow()
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        _, rec = th.run(model, x, attention_mask=masks[number], capture="whole", transform=transforms.tokens("last"))
        found[number] = rec["whole"]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], torch.stack([x[0, 1], x[1, 3]]))
    assert torch.equal(found[1], torch.stack([x[0, 2], x[1, 0]]))


def test_what_the_model_was_called_with_is_let_go_when_the_session_ends() -> None:
    model = Parts()
    for stop in (False, True):
        x = torch.randn(2, 4, 2)
        gone = weakref.ref(x)
        session = th.capture(model, "whole", transform=transforms.tokens("last"), stop=stop)
        session.run(x, attention_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
        del x
        gc.collect()
        assert gone() is None
        del session
