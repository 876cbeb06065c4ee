"""Values in which rows and tokens share dim 0, as experts have them: what positions and rows mean, by bare hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.language_models import made
from torchhook import edits
from torchhook import transforms as tf
from torchhook.errors import EditError, TransformError

ROWS, TOKENS = 2, 6
IDS = torch.arange(2, 2 + ROWS * TOKENS).reshape(ROWS, TOKENS)
OTHER = IDS.flip(0)
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def moe() -> nn.Module:
    model: nn.Module = made("mixtral")
    return model


@contextmanager
def hooked(model: nn.Module, change: Callable[[Tensor], None]) -> Iterator[None]:
    """A bare hook that writes to a copy of what the experts make, seen as rows of tokens."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        new = output.clone()
        change(new.view(len(args[0]) // TOKENS, TOKENS, -1) if len(args[0]) > ROWS else new[:, None])
        return new

    handle = model.get_submodule(EXPERTS).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def logits(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **more).logits
    return found


CHOICES: list[dict[str, Any]] = [
    {"positions": 2},
    {"positions": [0, -1]},
    {"positions": [[1], [4]]},
    {"rows": 1},
    {"rows": 0, "positions": slice(1, 3)},
    {"positions": torch.tensor([[False] * 5 + [True], [True] + [False] * 5])},
]


def place(choice: dict[str, Any]) -> Any:
    positions, rows = choice.get("positions", slice(None)), choice.get("rows", slice(None))
    if isinstance(positions, Tensor):
        return positions
    if isinstance(positions, list) and isinstance(positions[0], list):
        return torch.arange(ROWS)[:, None], torch.tensor(positions)
    return rows, positions


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("site", [EXPERTS, "@experts.1"])
def test_rows_and_positions_are_those_of_the_call(moe: nn.Module, choice: dict[str, Any], site: str) -> None:
    index = place(choice)
    with hooked(moe, lambda value: value.__setitem__(index, value[index] * 3)):
        expected = logits(moe)
    with th.edit(moe, {site: edits.only(edits.scale(3), **choice)}):
        assert torch.equal(logits(moe), expected)
    assert not torch.equal(logits(moe), expected)


@pytest.mark.parametrize("positions", [2, [0, -1], slice(1, 4), [[1], [4]]], ids=str)
def test_patched_positions_are_tokens(moe: nn.Module, positions: Any) -> None:
    with torch.no_grad(), th.capture(moe, "@experts.1", "@router.1") as rec:
        moe(OTHER)
    new, index = rec["@experts.1"].reshape(ROWS, TOKENS, -1), place({"positions": positions})
    with hooked(moe, lambda value: value.__setitem__(index, new[index])):
        expected = logits(moe)
    with th.edit(moe, {"@experts.1": edits.patch(rec, positions=positions)}):
        assert torch.equal(logits(moe), expected)
    with th.edit(moe, {"@experts.1": edits.only(edits.patch(rec), positions=positions)}):
        assert torch.equal(logits(moe), expected)
    with th.capture(moe, "@router.1", edit={"@router.1": edits.patch(rec, positions=positions)}) as after:
        logits(moe)
    before = th.run(moe, IDS, capture="@router.1")[1]["@router.1"].detach().reshape(ROWS, TOKENS, -1).clone()
    before[index] = rec["@router.1"].reshape(ROWS, TOKENS, -1)[index]
    assert torch.equal(after["@router.1"].reshape(ROWS, TOKENS, -1), before)


def test_while_a_model_generates_each_step_has_its_own_tokens(moe: nn.Module) -> None:
    def generated() -> Tensor:
        found: Tensor = moe.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        return found

    def last(value: Tensor) -> None:
        value[1, -1] *= -5

    with torch.no_grad():
        with hooked(moe, last):
            expected = generated()
        with th.edit(moe, {"@experts.1": edits.only(edits.scale(-5), positions=-1, rows=1)}):
            assert torch.equal(generated(), expected)
        assert not torch.equal(generated(), expected)


def test_what_is_kept_is_what_would_be_changed(moe: nn.Module) -> None:
    with torch.no_grad(), th.capture(moe, EXPERTS) as rec:
        moe(IDS)
    whole = rec[EXPERTS].reshape(ROWS, TOKENS, -1)
    wanted: list[tuple[Any, Tensor]] = [
        (tf.only(rows=1), whole[1:]),
        (tf.only(positions=[0, -1]), whole[:, [0, -1]]),
        (tf.tokens("last"), whole[:, -1]),
        (tf.pool("mean"), whole.mean(1)),
        (tf.compose(tf.cast(torch.float64), tf.only(rows=0, positions=2)), whole[:1, 2:3].double()),
    ]
    for transform, expected in wanted:
        with torch.no_grad(), th.capture(moe, EXPERTS, transform=transform) as rec:
            moe(IDS)
        torch.testing.assert_close(rec[EXPERTS], expected)


def test_positions_are_counted_without_padding(moe: nn.Module) -> None:
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    call = {"input_ids": IDS, "attention_mask": mask}
    with torch.no_grad(), th.capture(moe, EXPERTS) as rec:
        moe(**call)
    whole = rec[EXPERTS].reshape(ROWS, TOKENS, -1)
    expected = torch.stack([whole[0, 3], whole[1, 5]])
    for transform in (tf.tokens("last"), tf.compose(tf.only(positions=-1), tf.pool("sum"))):
        with torch.no_grad(), th.capture(moe, EXPERTS, transform=transform) as rec:
            moe(**call)
        assert torch.equal(rec[EXPERTS], expected)


def test_gradients_have_the_rows_of_the_call_before(moe: nn.Module) -> None:
    with th.capture(moe, "@experts.1:grad") as rec:
        moe(IDS).logits.square().sum().backward()
    with th.capture(moe, "@experts.1:grad", transform=tf.only(rows=1, positions=3)) as part:
        moe(IDS).logits.square().sum().backward()
    moe.zero_grad()
    torch.testing.assert_close(part["@experts.1:grad"][0, 0], rec["@experts.1:grad"][TOKENS + 3])


class Flat(nn.Module):
    """A plain module whose middle has rows and tokens in one dim, and its end only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.some, self.pooled = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.inner(x.flatten(0, 1))
        return flat, self.some(flat[:5]), self.pooled(flat.unflatten(0, x.shape[:2])[:, 0])


def test_a_model_that_generates_nothing_has_them_too() -> None:
    x = torch.randn(2, 3, 4)
    with th.edit(model := Flat(), {"inner": edits.only(edits.zero(), rows=1)}):
        found = model(x)[0]
    assert found.unflatten(0, (2, 3))[1].eq(0).all()
    assert torch.equal(found[:3], x[0])
    with th.edit(model, {"pooled": edits.only(edits.zero(), rows=1)}):  # rows of their own stay rows
        assert torch.equal(model(x)[2], torch.stack([x[0, 0], torch.zeros(4)]))


def test_the_edit_sees_rows_of_tokens_and_tensors_of_the_whole_fit() -> None:
    x, seen = torch.randn(2, 3, 4), []
    whole = torch.randn(6, 4)
    with th.edit(model := Flat(), {"inner": edits.only([seen.append, edits.add(whole)], positions=[0, 2], rows=1)}):
        found = model(x)[0].unflatten(0, (2, 3))
    assert torch.equal(seen[0], x[1:, [0, 2]])
    expected = x.clone()
    expected[1, [0, 2]] += whole.unflatten(0, (2, 3))[1, [0, 2]]
    assert torch.equal(found, expected)


def test_what_is_neither_rows_nor_their_tokens_is_refused() -> None:
    x, model = torch.randn(2, 3, 4), Flat()
    _, rec = th.run(model, x, capture=["some", "pooled"])
    refused = {
        "some": [edits.only(edits.zero(), rows=1), edits.only(edits.zero(), positions=1), edits.patch(rec, 1)],
        "pooled": [edits.only(edits.zero(), positions=1), edits.patch(rec, positions=1)],
    }
    for site, each in refused.items():
        for edit in each:
            with th.edit(model, {site: edit}), pytest.raises(EditError, match=rf"^{site}#\d: .*\((5|2), 4\)"):
                model(x)
    with pytest.raises(TransformError, match="called with 2"), th.capture(model, "some", transform=tf.only(rows=1)):
        model(x)
    with th.edit(model, {"some": edits.only(edits.zero(), rows=edits.along(1, dim=0))}):
        assert model(x)[1][1].eq(0).all()
    with th.edit(model, {"inner": edits.only(edits.zero(), rows=1, positions=edits.along(0, dim=1))}):
        with pytest.raises(EditError, match="rows and tokens share a dim"):
            model(x)


def test_a_part_that_is_called_by_itself_is_taken_as_it_is() -> None:
    x = torch.randn(2, 3, 4)
    with th.edit(model := Flat(), {"inner": edits.only(edits.zero(), rows=1)}):
        model(x)
        assert model.inner(torch.ones(4, 2))[1].eq(0).all()


class Wrapped(nn.Module):
    """As PEFT has it: ``generate`` goes past the wrapper, and its own call does not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.model.generate(*args, **kwargs)  # type: ignore[operator]
        return found

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.model(**inputs)


def test_a_wrapper_that_hands_generate_on_has_the_rows_of_what_it_wraps(moe: nn.Module) -> None:
    model = Wrapped(moe)
    with torch.no_grad(), hooked(moe, lambda value: value[1].mul_(-5)):
        expected, direct = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0), logits(moe)
    with torch.no_grad(), th.edit(model, {f"model.{EXPERTS}": edits.only(edits.scale(-5), rows=1)}):
        assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0), expected)
        assert torch.equal(model({"input_ids": IDS}).logits, direct)


class Checkpointed(Flat):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat: Tensor = checkpoint(lambda value: self.inner(value.flatten(0, 1).sin()).exp(), x, use_reentrant=False)
        return flat, flat, flat


def test_what_is_computed_once_more_is_edited_alike() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    with th.edit(model := Checkpointed(), {"inner": edits.only(edits.scale(3), rows=1)}):
        model(x)[0].sum().backward()
    factor = torch.tensor([1.0, 3.0])[:, None, None]
    y = x.detach().requires_grad_()
    (y.sin() * factor).exp().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_model_can_be_copied_while_it_is_edited() -> None:
    with th.edit(model := Flat(), {"inner": edits.only(edits.zero(), rows=1)}):
        for one in (model, copy.deepcopy(model)):
            assert one(torch.ones(2, 3, 4))[0].shape == (6, 4)


def test_rows_of_nodes_are_no_rows_of_edges() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = nn.Identity()

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            found: Tensor = self.nodes(x)
            return found

    with th.edit(model := Graph(), {"nodes": edits.only(edits.zero(), rows=1)}):
        assert model(torch.ones(6, 4), torch.ones(2, 3, dtype=torch.long))[:, 0].tolist() == [1, 0, 1, 1, 1, 1]
