"""Tokens and heads of what attention takes: whatever the kernel, what bare hooks on the projections make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_gpt2, small_llama, small_t5
from torchhook import edits
from torchhook import transforms as tf
from torchhook.errors import EditError
from torchhook.types import Recording

Change = Callable[[Tensor], Tensor]


class Attention:
    """Where one model makes queries, keys and values: each projection, and its part, as (N, T, heads, size)."""

    def __init__(self, make: Any, kernel: str, masked: bool) -> None:
        self.model, call = make(attn_implementation=kernel)
        self.ids: Tensor = call["input_ids"]
        self.mask = torch.ones_like(self.ids)
        if masked:  # a fused kernel is given repeated keys then
            self.mask[0, 4:] = 0
        self.t5 = make is small_t5
        self.of_gpt2 = make is small_gpt2
        self.prefix = "@decoder." if self.t5 else "@"
        self.sizes = {"q": (4, 6 if self.t5 else 8)}
        self.sizes |= dict.fromkeys("kv", (2, 8) if make is small_llama else self.sizes["q"])

    def site(self, name: str) -> str:
        return f"{self.prefix}{name}.1"

    def call(self, ids: Tensor) -> dict[str, Any]:
        own = {"input_ids": ids, "use_cache": False}
        decoder = {"decoder_input_ids": ids, "decoder_attention_mask": self.mask}
        return own | (decoder if self.t5 else {"attention_mask": self.mask})

    def __call__(self, ids: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model(**self.call(self.ids if ids is None else ids)).logits
        return found

    def projection(self, name: str) -> nn.Module:
        path = {
            "GPT2": "transformer.h.1.attn.c_attn",
            "Llam": f"model.layers.1.self_attn.{name}_proj",
            "T5Fo": f"decoder.block.1.layer.0.SelfAttention.{name}",
        }[type(self.model).__name__[:4]]
        found: nn.Module = self.model.get_submodule(path)
        return found

    def part(self, output: Tensor, name: str) -> Tensor:
        """The heads of a projection, as a view."""
        start = 32 * "qkv".index(name) if self.of_gpt2 else 0
        heads, size = self.sizes[name]
        return output[..., start : start + heads * size].unflatten(-1, (heads, size))

    @contextmanager
    def hooked(self, name: str, change: Change) -> Iterator[None]:
        """A bare hook that changes the heads in place."""

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            part = self.part(output, name)
            part.copy_(change(part.clone()))
            return output

        handle = self.projection(name).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


MODELS = {
    f"{make.__name__} {kernel}{' with padding' * masked}": (make, kernel, masked)
    for make in (small_gpt2, small_llama, small_t5)
    for kernel in ("eager", "sdpa")
    for masked in (False, True)
}


@pytest.fixture(scope="module", params=MODELS)
def attention(request: pytest.FixtureRequest) -> Attention:
    return Attention(*MODELS[request.param])  # once, for names are looked for in each


def recorded(attention: Attention, name: str, ids: Tensor) -> tuple[Recording, Tensor]:
    """What passes the site, and what the projection makes, as a bare hook sees it."""
    seen: list[Tensor] = []
    site = attention.site(name)
    with (
        attention.hooked(name, lambda part: (seen.append(part.clone()), part)[1]),
        th.capture(attention.model, site) as rec,
    ):
        attention(ids)
    return rec, seen[-1]  # names are looked for before


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_positions_and_heads_are_those_of_the_projection(attention: Attention, name: str) -> None:
    """Twice and negative: numbers that no rotation of positions rounds."""
    heads = attention.sizes[name][0]
    plain = attention()
    for chosen, index in (
        ({"positions": [0, -2]}, (slice(None), [0, -2])),
        ({"heads": heads - 1}, (slice(None), slice(None), heads - 1)),
        ({"heads": [0], "positions": 1}, (slice(None), 1, 0)),
        ({"heads": -1, "positions": slice(1, 3), "rows": 1}, (1, slice(1, 3), -1)),
    ):

        def scaled(part: Tensor, index: Any = index) -> Tensor:
            part[index] *= -2
            return part

        with attention.hooked(name, scaled):
            expected = attention()
        with th.edit(attention.model, {attention.site(name): edits.only(edits.scale(-2), **chosen)}):
            edited = attention()
        assert torch.equal(edited, expected), chosen
        assert not torch.equal(edited, plain)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_patch_of_positions_is_one_of_tokens(attention: Attention, name: str) -> None:
    other = attention.ids.flip(0)
    rec, clean = recorded(attention, name, other)

    def patched(part: Tensor) -> Tensor:
        part[:, [1, 3]] = clean[:, [1, 3]]
        return part

    with attention.hooked(name, patched):
        expected = attention()
    site = attention.site(name)
    for edit in (
        edits.patch(rec, positions=[1, 3]),
        [edits.patch(rec, positions=[1, 3])],
        edits.only(edits.patch(rec), positions=[1, 3]),
        edits.patch(rec, positions=[1, 3], dim=2),
    ):
        with th.edit(attention.model, {site: edit}):
            assert torch.equal(attention(), expected)
    assert not torch.equal(expected, attention())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_sweep_goes_over_tokens_and_over_the_heads_that_there_are(attention: Attention, name: str) -> None:
    other, site, heads = attention.ids.flip(0), attention.site(name), attention.sizes[name][0]
    _, clean = recorded(attention, name, other)
    calls = attention.call(other), attention.call(attention.ids)

    def metric(output: Any) -> Tensor:
        return output.logits[1, -1, 3] - output.logits[1, -1, 5]

    def by_hand(index: tuple[Any, ...]) -> float:
        def patched(part: Tensor) -> Tensor:
            part[index] = clean[index]
            return part

        with attention.hooked(name, patched):
            found = attention()
        return float(found[1, -1, 3] - found[1, -1, 5])

    def sweep(**options: Any) -> Tensor:
        return th.sweep(attention.model, *calls, metric, sites=site, progress=False, **options).values[0]

    tokens = torch.tensor([by_hand((slice(None), position)) for position in range(6)]).double()
    torch.testing.assert_close(sweep(), tokens, rtol=1e-4, atol=1e-5)
    every = torch.tensor([by_hand((slice(None), slice(None), head)) for head in range(heads)]).double()
    torch.testing.assert_close(sweep(over="head", batch=1), every, rtol=1e-4, atol=1e-5)
    assert tokens.std() > 0


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_kept_of_tokens_and_heads_is_the_same_for_every_kernel(name: str) -> None:
    for make in (small_gpt2, small_llama, small_t5):
        found = []
        for kernel, masked in (("eager", False), ("sdpa", False), ("sdpa", True)):
            attention = Attention(make, kernel, masked)
            site = attention.site(name)
            with th.capture(attention.model, site, transform=tf.only(heads=1, positions=[0, 3])) as rec:
                attention()
            with th.capture(attention.model, site, transform=tf.tokens(2)) as one:
                attention()
            with th.capture(attention.model, site) as whole:
                attention()
            assert rec[site].shape == (2, 1, 2, attention.sizes[name][1])
            assert torch.equal(one[site], whole[site][:, :, 2])
            found.append(rec[site])
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(found[2], found[0])


def test_as_many_tokens_as_heads_are_told_apart_by_what_a_name_stands_for() -> None:
    for kernel in ("eager", "sdpa"):
        model, call = small_llama(attn_implementation=kernel)
        ids = call["input_ids"][:, :4]
        for name in ("@q.0", "@k.0", "@v.0"):
            with torch.no_grad(), th.capture(model, name, transform=tf.tokens("last")) as rec:
                model(ids)
            with torch.no_grad(), th.capture(model, name) as whole:
                model(ids)
            assert torch.equal(rec[name], whole[name][:, :, -1])


def test_copies_of_a_head_that_differ_are_no_head() -> None:
    model, call = small_llama(attn_implementation="eager")
    mixed = [lambda value: value * torch.arange(1.0, 5).reshape(1, 4, 1, 1), edits.only(edits.zero(), heads=1)]
    with torch.no_grad(), th.edit(model, {"@k.0": mixed}), pytest.raises(EditError, match="2 heads of keys or values"):
        model(**call)
    named = [mixed[0], edits.only(edits.zero(), heads=edits.along(3, dim=1))]
    with torch.no_grad(), th.edit(model, {"@k.0": named}), th.capture(model, "@k.0") as rec:
        model(**call)
    assert [bool(head.any()) for head in rec["@k.0"][0]] == [True, True, True, False]


def test_a_head_that_is_repeated_may_hold_anything() -> None:
    """A NaN is like another, and an edit's gradient is that of the projection."""
    model, call = small_llama(attn_implementation="eager")
    vector = torch.full((8,), torch.nan)
    with (
        torch.no_grad(),
        th.edit(model, {"@v.0": [edits.only(edits.add(vector), heads=0)] * 2}),
        th.capture(model, "@v.0") as rec,
    ):
        model(**call)
    assert rec["@v.0"][:, :2].isnan().all()
    assert not rec["@v.0"][:, 2:].isnan().any()
    gradients = []
    for kernel in ("eager", "sdpa"):
        model, call = small_llama(attn_implementation=kernel)
        with th.edit(model, {"@v.0": edits.only(torch.tanh, heads=1, positions=[1, 2])}):
            model(**call).logits.pow(2).sum().backward()
        gradients.append(model.model.layers[0].self_attn.v_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_tokens_that_cannot_be_told_from_heads_are_asked_for() -> None:
    """After a view, neither a name nor the operation says which of two equal dims is which."""
    model, call = small_llama()
    ids = call["input_ids"][:, :4]
    site = "model.layers.0.self_attn/view(0)"
    with torch.no_grad(), th.capture(model, site) as rec:
        model(ids)
    assert rec[site].shape[1:3] == (4, 4)
    with torch.no_grad(), th.edit(model, {site: edits.patch(rec, positions=[0])}):
        with pytest.raises(EditError, match=r"heads may be dim 1 or dim 2 of .* Name the dim of the tokens: dim=…"):
            model(ids)
    with pytest.raises(EditError, match=r"heads may be dim 1 or dim 2 of .* Name the dim of the tokens: dim=…"):
        th.sweep(model, ids, ids.flip(0), lambda out: out.logits[0, -1, 1], sites=site, progress=False)


def test_a_head_that_is_repeated_is_estimated_as_one() -> None:
    """By a gradient, which comes for each copy: their sum is that of the head."""
    found = []
    for kernel in ("eager", "sdpa"):
        model, call = small_llama(attn_implementation=kernel)
        ids = call["input_ids"]
        options: dict[str, Any] = {"sites": ["@k.0", "@v.1"], "over": "head", "estimate": "gradient"}
        found.append(th.sweep(model, ids[:1], ids[1:], _margin, progress=False, **options).values)
    assert found[0].shape == (2, 2)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def _margin(output: Any) -> Tensor:
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


def test_the_channels_of_a_map_are_still_dim_1() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    with torch.no_grad(), th.capture(model, "0") as rec:
        model(torch.ones(1, 1, 2, 2))
    with torch.no_grad(), th.edit(model, {"0": edits.patch(rec, positions=[1])}):
        edited = model(torch.zeros(1, 1, 2, 2))
    expected = model(torch.zeros(1, 1, 2, 2)).detach()
    expected[:, 1] = rec["0"][:, 1]
    assert torch.equal(edited, expected)
