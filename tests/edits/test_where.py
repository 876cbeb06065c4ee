"""``edits.only``: parts of a value against indexing by hand, in toys and in language models with bare hooks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_bert, small_gpt2, small_llama, small_t5
from torchhook import edits
from torchhook.errors import EditError
from torchhook.types import Site

HERE = Site("h.3", call=0)


def value(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1


def by_hand(x: Tensor, index: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    new = x.clone()
    new[index] = change(x[index])
    return new


MASK = torch.tensor([[True, False, False, True], [False, False, True, False], [False] * 4])

# What is chosen, and the index that a hook written by hand would use.
CHOICES: dict[str, tuple[dict[str, Any], Any]] = {
    "a position": ({"positions": 2}, np.s_[:, 2:3]),
    "the last position": ({"positions": -1}, np.s_[:, -1:]),
    "a slice": ({"positions": slice(1, 3)}, np.s_[:, 1:3]),
    "a slice from the end": ({"positions": slice(-2, None)}, np.s_[:, -2:]),
    "every other": ({"positions": slice(None, None, 2)}, np.s_[:, ::2]),
    "a slice of nothing": ({"positions": slice(9, None)}, np.s_[:, 9:]),
    "a list": ({"positions": [3, 0]}, np.s_[:, [3, 0]]),
    "a list with a negative": ({"positions": [-1, 1]}, np.s_[:, [-1, 1]]),
    "a range": ({"positions": range(1, 4)}, np.s_[:, [1, 2, 3]]),
    "an array": ({"positions": np.array([0, 2])}, np.s_[:, [0, 2]]),
    "a tensor": ({"positions": torch.tensor([0, 2])}, np.s_[:, [0, 2]]),
    "a mask of positions": ({"positions": [True, False, False, True]}, np.s_[:, [0, 3]]),
    "a row": ({"rows": 1}, np.s_[1:2]),
    "rows": ({"rows": [2, 0]}, np.s_[[2, 0]]),
    "a mask of rows": ({"rows": torch.tensor([True, False, True])}, np.s_[[0, 2]]),
    "rows and positions": ({"rows": [2, 0], "positions": [1, 3]}, ([[2], [0]], [[1, 3]])),
    "rows and a slice": ({"rows": slice(1, None), "positions": [1]}, np.s_[1:, 1:2]),
    "one position for each row": ({"positions": [[0], [3], [1]]}, ([[0], [1], [2]], [[0], [3], [1]])),
    "one from the end for each row": (
        {"positions": torch.tensor([[-1], [0], [-2]])},
        ([[0], [1], [2]], [[-1], [0], [-2]]),
    ),
    "two positions for each row": (
        {"positions": [[0, 1], [3, 2], [1, 0]]},
        ([[0], [1], [2]], [[0, 1], [3, 2], [1, 0]]),
    ),
    "some rows of one for each": ({"positions": [[0], [3], [1]], "rows": [2]}, ([[2]], [[1]])),
    "a mask of rows and positions": ({"positions": MASK}, MASK),
    "some rows of a mask": ({"positions": MASK, "rows": 0}, ([0, 0], [0, 3])),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "scale": lambda x: x * 3,
    "add": lambda x: x + torch.tensor([1.0, 2.0]),
    "clamp": lambda x: x.clamp(None, 5.0),
    "mean": lambda x: x.mean(0, keepdim=True).expand_as(x),
    "replace": lambda x: torch.tensor([1.0, 2.0]).expand_as(x),
    "function": lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
}
EDITS = {
    "zero": edits.zero(),
    "scale": edits.scale(3),
    "add": edits.add(torch.tensor([1.0, 2.0])),
    "clamp": edits.clamp(high=5.0),
    "mean": edits.mean(),
    "replace": edits.replace(torch.tensor([1.0, 2.0])),
    "function": CHANGES["function"],
}


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("name", CHOICES)
def test_a_part_is_changed_as_indexing_by_hand_does(name: str, how: str) -> None:
    chosen, index = CHOICES[name]
    x = value(3, 4, 2)
    if name == "a slice of nothing" and how == "mean":
        pytest.skip("a mean of nothing")
    expected = by_hand(x, index, CHANGES[how])
    assert torch.equal(edits.only(EDITS[how], **chosen)(x, HERE), expected)
    assert torch.equal(x, value(3, 4, 2))


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_are_those_of_indexing_by_hand(name: str) -> None:
    chosen, index = CHOICES[name]
    weights = torch.randn(3, 4, 2)

    def gradient(change: Callable[[Tensor], Tensor]) -> Tensor:
        x = value(3, 4, 2).div(10).requires_grad_()
        (change(x) * weights).sum().backward()
        assert x.grad is not None
        return x.grad

    edit = edits.only(lambda part: part.sin() * 2, **chosen)
    expected = gradient(lambda x: by_hand(x, index, lambda part: part.sin() * 2))
    assert torch.equal(gradient(lambda x: edit(x, HERE)), expected)


def test_what_is_not_chosen_has_no_part_in_the_gradient_of_the_edit() -> None:
    # The root of zero has an infinite slope: a hook that took the root of all and threw most away would give NaN.
    x = torch.tensor([[[0.0], [4.0]]], requires_grad=True)
    edits.only(torch.sqrt, positions=1)(x, HERE).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[[1.0], [0.25]]]


def test_the_gradient_reaches_what_the_edit_holds() -> None:
    vector = torch.zeros(2, requires_grad=True)
    edits.only(edits.add(vector), positions=[1, 2], rows=0)(value(3, 4, 2), HERE).sum().backward()
    assert vector.grad is not None and vector.grad.tolist() == [2.0, 2.0]


def test_a_function_may_write_to_the_part_and_not_to_the_value() -> None:
    for returned in (True, False):
        for chosen in ({"positions": 1}, {"positions": [1, 2]}):
            x = value(2, 3, 2)

            def write(part: Tensor, returned: bool = returned) -> Tensor | None:
                part.zero_()
                return part if returned else None

            index = np.s_[:, 1:2] if chosen["positions"] == 1 else np.s_[:, [1, 2]]
            assert torch.equal(edits.only(write, **chosen)(x, HERE), by_hand(x, index, torch.zeros_like))
            assert torch.equal(x, value(2, 3, 2))


def test_a_tensor_of_the_whole_is_taken_at_the_part() -> None:
    x, new = value(3, 4, 2), torch.randn(3, 4, 2)
    for name, (chosen, index) in CHOICES.items():
        expected = x.clone()
        expected[index] = new[index]
        assert torch.equal(edits.only(edits.replace(new), **chosen)(x, HERE), expected), name
        expected[index] = x[index] + new[index]
        assert torch.equal(edits.only(edits.add(new), **chosen)(x, HERE), expected), name
    one = edits.only(edits.replace(new[:1]), positions=[2, 3])(x, HERE)  # of one row, for all of them
    assert torch.equal(one[:, 2:], new[:1, 2:].expand(3, 2, 2))


def test_a_tensor_of_the_part_is_taken_in_the_order_that_is_written() -> None:
    new = torch.randn(2, 2)
    edited = edits.only(edits.replace(new), positions=[3, 1])(value(3, 4, 2), HERE)
    assert torch.equal(edited[:, 3], new[0].expand(3, 2)) and torch.equal(edited[:, 1], new[1].expand(3, 2))


def test_several_edits_are_made_of_the_same_part_in_order() -> None:
    x = value(2, 3, 2)
    edited = edits.only([edits.add(1), lambda v: None, edits.scale(2)], positions=0)(x, HERE)
    assert torch.equal(edited, by_hand(x, np.s_[:, :1], lambda part: (part + 1) * 2))


def test_a_leaf_may_be_named_inside_or_outside() -> None:
    pair = (value(2, 3, 2), value(2, 5, 2))
    for edit in (
        edits.only(edits.at("1", edits.zero()), positions=-1),
        edits.at("1", edits.only(edits.zero(), positions=-1)),
        edits.only([edits.at("1", edits.scale(2)), edits.at("1", edits.zero())], positions=-1),
    ):
        first, second = edit(pair, HERE)
        assert first is pair[0] and torch.equal(second, by_hand(pair[1], np.s_[:, -1:], torch.zeros_like))
    with pytest.raises(EditError, match=r"this value has 2: '0', '1'. Name one with edits.at\('0', edits.only"):
        edits.only(edits.zero(), positions=0)(pair, HERE)


def test_parts_of_parts_are_counted_in_the_part() -> None:
    x = value(2, 4, 2)
    inner = edits.only(edits.zero(), positions=0)
    edited = edits.only(inner, positions=[2, 3], rows=1)(x, HERE)
    assert torch.equal(edited, by_hand(x, np.s_[1:, 2:3], torch.zeros_like))


def test_a_patch_takes_the_same_part_of_what_was_recorded() -> None:
    model = nn.Sequential(nn.Identity())
    clean, other = value(3, 4, 2), -value(3, 4, 2)
    _, recorded = th.run(model, other, capture="0")
    for name, (chosen, index) in CHOICES.items():
        for edit in (edits.patch(recorded), [edits.scale(2), edits.patch(recorded)]):
            with th.edit(model, {"0": edits.only(edit, **chosen)}):
                assert torch.equal(model(clean), by_hand(clean, index, torch.neg)), name
    with th.edit(model, {"0": edits.only(edits.patch(recorded, positions=[0, 1]), positions=[1, 2])}):
        assert torch.equal(model(clean), by_hand(clean, np.s_[:, 1:2], torch.neg))
    with th.edit(model, {"0": edits.only(edits.patch(recorded), positions=-1)}):
        with pytest.raises(EditError, match=r"changes the shape: expected \(3, 5, 2\), found \(3, 4, 2\)"):
            model(value(3, 5, 2))


def test_dims_may_be_named() -> None:
    x = value(4, 3, 2)  # tokens first
    named = edits.only(edits.zero(), positions=edits.along([[0], [3], [1]], dim=0), rows=edits.along(slice(None), dim=1))
    assert torch.equal(named(x, HERE), by_hand(x, ([0, 3, 1], [0, 1, 2]), torch.zeros_like))
    image = value(2, 3, 4, 4)
    assert torch.equal(
        edits.only(edits.zero(), positions=edits.along(1, dim=-1))(image, HERE),
        by_hand(image, np.s_[..., 1:2], torch.zeros_like),
    )
    joined = value(2, 3, 8)
    split = edits.only(edits.add(torch.ones(2)), heads=edits.along([1, 3], dim=-1, count=4))
    assert torch.equal(split(joined, HERE), by_hand(joined.view(2, 3, 4, 2), np.s_[..., [1, 3], :], lambda x: x + 1).flatten(2))


@pytest.mark.parametrize(
    ("chosen", "shape", "said"),
    [
        ({"positions": 4}, (3, 4, 2), "positions=4 is outside of the 4 that there are"),
        ({"positions": [0, -5]}, (3, 4, 2), "positions=-5 is outside of the 4"),
        ({"positions": [1, -3]}, (3, 4, 2), "names one twice among 4"),
        ({"positions": [[0], [1]]}, (3, 4, 2), "positions have 2 lines, and there are 3 rows"),
        ({"positions": MASK}, (3, 5, 2), "the mask of positions is 4 long, and there are 5"),
        ({"rows": [True, False]}, (3, 4, 2), "the mask of rows has 2 elements, and there are 3"),
        ({"positions": 0}, (3, 2), "positions are the dim after the rows in values of 3 dims"),
        ({"positions": 0}, (3, 4, 2, 2), "which of four dims the positions are"),
        ({"heads": 0}, (3, 4, 2), "the modules around a site are known in a session only"),
        ({"heads": edits.along(0, dim=-1, count=3)}, (3, 4, 2), "cannot be split into 3 heads"),
        ({"heads": edits.along(0, dim=5)}, (3, 4, 2), "there is no dim 5"),
        ({"positions": 0, "rows": edits.along(0, dim=1)}, (3, 4, 2), "have to be different dims"),
        ({"positions": edits.along(0, dim=1, count=2)}, (3, 4, 2), "positions have one of their own"),
    ],
)
def test_what_is_not_there_is_said(chosen: dict[str, Any], shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(EditError, match="h.3#0: edits.only: .*") as caught:
        edits.only(edits.zero(), **chosen)(value(*shape), HERE)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "needs positions=, rows=, heads= or steps="),
        ({"positions": "last"}, "positions='last': give an integer, a slice"),
        ({"positions": 0.5}, "positions=0.5: give"),
        ({"positions": True}, "positions=True: give"),
        ({"positions": []}, "chooses nothing"),
        ({"rows": [[0], [1]]}, "of 2 dims: give an integer"),
        ({"steps": -1}, "count from 0"),
        ({"steps": [0, -1]}, "count from 0"),
        ({"steps": [True, False]}, "steps=: give an integer, a slice or a list"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_at_once(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        edits.only(edits.zero(), **chosen)


def test_an_edit_that_changes_the_shape_of_its_part_is_refused() -> None:
    with pytest.raises(EditError, match=r"changes the shape: expected \(3, 1, 2\), found \(3, 2\)"):
        edits.only(lambda part: part[:, 0], positions=0)(value(3, 4, 2), HERE)
    with pytest.raises(EditError, match="changes the dtype"):
        edits.only(lambda part: part.double(), positions=0)(value(3, 4, 2), HERE)


def test_they_print_as_written_compare_and_pickle() -> None:
    edit = edits.only(edits.add(torch.ones(2)), positions=[1, -1], heads=edits.along(3, dim=-1, count=12), steps=slice(1, None))
    assert repr(edit) == (
        "edits.only(edits.add(tensor([1.0, 1.0])), positions=[1, -1], heads=edits.along(3, 12, dim=-1), "
        "steps=slice(1, None, None))"
    ).replace("along(3, 12, dim=-1)", "along(3, -1, 12)")
    assert repr(edits.only([edits.zero(), edits.scale(2)], rows=0)) == "edits.only([edits.zero(), edits.scale(2)], rows=0)"
    for one in (edit, edits.only(edits.zero(), positions=MASK), edits.only(edits.zero(), positions=[[1], [2]])):
        again = pickle.loads(pickle.dumps(one))
        assert again == one and hash(again) == hash(one) and repr(again) == repr(one)
    assert edits.only(edits.zero(), positions=range(2)) == edits.only(edits.zero(), positions=torch.tensor([0, 1]))
    assert edits.only(edits.zero(), positions=0) != edits.only(edits.zero(), rows=0)


# -- language models, by bare hooks -----------------------------------------------------------------------------------


def hooked(model: nn.Module, site: str, change: Callable[[Tensor], Tensor], call: dict[str, Any]) -> Tensor:
    """The logits with a hook written by hand."""
    path, _, port = site.partition(":")
    module = model.get_submodule(path)
    if port == "input":
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _, args, out: change(out))
    try:
        return logits(model(**call))
    finally:
        handle.remove()


def logits(output: Any) -> Tensor:
    found = output.logits if hasattr(output, "logits") else output.last_hidden_state
    assert isinstance(found, Tensor)
    return found


def heads_by_hand(sizes: tuple[int, ...], heads: list[int], positions: Any, change: Any) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        split = x.clone().unflatten(-1, sizes)
        for head in heads:
            split[:, positions, ..., head, :] = change(split[:, positions, ..., head, :])
        return split.flatten(2) if len(sizes) == 2 else split.flatten(2)

    return changed


PROJECTIONS = {
    "gpt2 fused": (small_gpt2, "transformer.h.1.attn.c_attn", (3, 4, 8), [1, 3]),
    "gpt2 joined": (small_gpt2, "transformer.h.1.attn.c_proj:input", (4, 8), [0]),
    "llama queries": (small_llama, "model.layers.1.self_attn.q_proj", (4, 8), [-1, 0]),
    "llama keys": (small_llama, "model.layers.0.self_attn.k_proj", (2, 8), [1]),
    "llama values": (small_llama, "model.layers.0.self_attn.v_proj", (2, 8), [0]),
    "llama joined": (small_llama, "model.layers.0.self_attn.o_proj:input", (4, 8), [2]),
    "t5 encoder": (small_t5, "encoder.block.1.layer.0.SelfAttention.v", (4, 6), [1, 2]),
    "t5 decoder": (small_t5, "decoder.block.0.layer.0.SelfAttention.o:input", (4, 6), [3]),
    "t5 across": (small_t5, "decoder.block.1.layer.1.EncDecAttention.k", (4, 6), [0]),
    "bert": (small_bert, "encoder.layer.0.attention.self.query", (4, 8), [2]),
    "bert joined": (small_bert, "encoder.layer.1.attention.output.dense:input", (4, 8), [2]),
}


@pytest.mark.parametrize("positions", [slice(None), [0, -1]], ids=["everywhere", "at two positions"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_heads_of_projections_are_changed_as_bare_hooks_do(name: str, positions: Any) -> None:
    make, site, sizes, heads = PROJECTIONS[name]
    model, call = make()
    with torch.no_grad():
        expected = hooked(model, site, heads_by_hand(sizes, heads, positions, lambda x: x * -2), call)
        with th.edit(model, {site: edits.only(edits.scale(-2), heads=heads, positions=positions)}):
            edited = logits(model(**call))
        plain = logits(model(**call))
    assert torch.equal(edited, expected) and not torch.equal(edited, plain)


@pytest.mark.parametrize("make", [small_gpt2, small_llama, small_t5])
def test_positions_and_rows_of_a_block_are_changed_as_bare_hooks_do(make: Any) -> None:
    model, call = make()
    site = {"GPT2": "transformer.h.1", "Llam": "model.layers.1", "T5Fo": "decoder.block.1"}[type(model).__name__[:4]]
    vector, masked = torch.randn(model.config.hidden_size), torch.rand(2, 6) > 0.5
    for chosen, index in (
        ({"positions": [1, -1], "rows": 1}, np.s_[1:2, [1, -1]]),
        ({"positions": [[2], [4]]}, ([[0], [1]], [[2], [4]])),
        ({"positions": masked}, masked),
    ):

        def change(out: Any, index: Any = index) -> Any:
            hidden = out if isinstance(out, Tensor) else out[0]
            new = by_hand(hidden, index, lambda x: x + vector)
            return new if isinstance(out, Tensor) else (new, *out[1:])

        edit = edits.only(edits.add(vector), **chosen)
        with torch.no_grad():
            _, seen = th.run(model, **call, capture=site)
            edit = edit if isinstance(seen[site], Tensor) else edits.at("0", edit)
            with th.edit(model, {site: edit}):
                edited = logits(model(**call))
            assert torch.equal(edited, hooked(model, site, change, call))


@pytest.mark.parametrize(("make", "site"), [(small_llama, "model.layers.0.self_attn"), (small_gpt2, "transformer.h.0.attn")])
def test_heads_are_found_after_they_are_split(make: Any, site: str) -> None:
    """Queries and keys of the fused kernel, against the whole and the same indexing."""
    model, call = make()
    op = f"{site}/scaled_dot_product_attention:input"
    _, rec = th.run(model, **call, capture=op)
    query, key, _ = rec[op].args
    assert query.shape[1] == 4 and key.shape[1] == (2 if make is small_llama else 4)
    edit = edits.only([edits.at("args.0", edits.zero()), edits.at("args.1", edits.scale(2))], heads=1, positions=[0, -1])
    _, after = th.run(model, **call, capture=op, edit={op: edit})
    for old, new, change in ((query, after[op].args[0], torch.zeros_like), (key, after[op].args[1], lambda x: x * 2)):
        expected = old.clone()
        expected[:, 1:2, [0, -1]] = change(old[:, 1:2, [0, -1]])
        assert torch.equal(new, expected)


def test_steering_a_head_changes_gradients_as_a_bare_hook_does() -> None:
    model, call = small_llama()
    site, vector = "model.layers.1.self_attn.o_proj:input", torch.randn(8)

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        model.zero_grad()
        run().pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def by_edit() -> Tensor:
        with th.edit(model, {site: edits.only(lambda x: x.tanh() + vector, heads=2, positions=-1)}):
            return logits(model(**call))

    def change(x: Tensor) -> Tensor:
        split = x.unflatten(-1, (4, 8))
        part = split[:, -1:, 2:3].tanh() + vector
        after = torch.cat([split[:, -1:, :2], part, split[:, -1:, 3:]], 2)
        return torch.cat([split[:, :-1], after], 1).flatten(2)

    expected = gradients(lambda: hooked(model, site, change, call))
    for found, wanted in zip(gradients(by_edit), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("model.layers.0", "is in no attention that says how many heads it has"),
        ("model.layers.0.mlp.down_proj:input", "is in no attention"),
        ("model.layers.0.self_attn", "no longer, or not yet, divided into heads"),
        ("model.layers.0.self_attn.o_proj", "'o_proj' joins the heads: they are in its input"),
        ("model.layers.0.self_attn.q_proj:input", "'q_proj' makes the heads: they are in its output"),
        ("model.layers.0.self_attn.k_proj", "heads=3 is outside of the 2 that there are (LlamaAttention"),
    ],
)
def test_heads_that_are_not_there_are_never_guessed(site: str, said: str) -> None:
    model, call = small_llama()
    edit = edits.only(edits.zero(), heads=3)
    with th.edit(model, {site: edit if site != "model.layers.0.self_attn" else edits.at("0", edit)}):
        with pytest.raises(EditError) as caught:
            model(**call)
    assert said in str(caught.value)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_gpt2, small_llama, small_t5])
@pytest.mark.parametrize(("steps", "meant"), [(0, {0}), ([0, 2], {0, 2}), (slice(1, None), {1, 2, 3}), (slice(0, 4, 2), {0, 2})])
def test_steps_of_a_generation_are_changed_as_a_counting_hook_does(make: Any, steps: Any, meant: set[int]) -> None:
    model, call = make()
    call = {name: call[name] for name in ("input_ids",)}
    site = {"GPT2": "transformer.h.0.mlp", "Llam": "model.layers.0.mlp", "T5Fo": "decoder.block.0.layer.2"}[type(model).__name__[:4]]
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    count = 0

    def change(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return by_hand(out, np.s_[:, -1:], lambda x: x * -5) if count - 1 in meant else out

    handle = model.get_submodule(site).register_forward_hook(change)
    expected = model.generate(**call, **more)
    handle.remove()
    with th.edit(model, {site: edits.only(edits.scale(-5), positions=-1, steps=steps)}):
        found = model.generate(**call, **more)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


def test_a_position_of_the_prompt_needs_the_step_in_a_generation() -> None:
    model, call = small_gpt2()
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with th.edit(model, {"transformer.h.0": edits.only(edits.zero(), positions=3)}):
        with pytest.raises(EditError, match="positions=3 is outside of the 1 that there are.*say steps=0 for the prompt"):
            model.generate(call["input_ids"], **more)
    with th.edit(model, {"transformer.h.0": edits.only(edits.zero(), positions=3, steps=0)}):
        model.generate(call["input_ids"], **more)


def test_a_pass_outside_of_a_generation_is_step_0() -> None:
    x = value(2, 3, 2)
    assert torch.equal(edits.only(edits.zero(), steps=0)(x, HERE), torch.zeros_like(x))
    assert edits.only(edits.zero(), steps=slice(1, None))(x, HERE) is None
