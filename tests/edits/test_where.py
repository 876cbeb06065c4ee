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
from torchhook import edits
from torchhook.errors import EditError, SessionError
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
    expected = x if name == "a slice of nothing" else by_hand(x, index, CHANGES[how])
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
    assert x.grad is not None
    assert x.grad.tolist() == [[[1.0], [0.25]]]


def test_the_gradient_reaches_what_the_edit_holds() -> None:
    vector = torch.zeros(2, requires_grad=True)
    edits.only(edits.add(vector), positions=[1, 2], rows=0)(value(3, 4, 2), HERE).sum().backward()
    assert vector.grad is not None
    assert vector.grad.tolist() == [2.0, 2.0]


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
    assert torch.equal(edited[:, 3], new[0].expand(3, 2))
    assert torch.equal(edited[:, 1], new[1].expand(3, 2))


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
        assert first is pair[0]
        assert torch.equal(second, by_hand(pair[1], np.s_[:, -1:], torch.zeros_like))
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
    named = edits.only(
        edits.zero(), positions=edits.along([[0], [3], [1]], dim=0), rows=edits.along(slice(None), dim=1)
    )
    assert torch.equal(named(x, HERE), by_hand(x, ([0, 3, 1], [0, 1, 2]), torch.zeros_like))
    image = value(2, 3, 4, 4)
    assert torch.equal(
        edits.only(edits.zero(), positions=edits.along(1, dim=-1))(image, HERE),
        by_hand(image, np.s_[..., 1:2], torch.zeros_like),
    )
    joined = value(2, 3, 8)
    split = edits.only(edits.add(torch.ones(2)), heads=edits.along([1, 3], dim=-1, count=4))
    assert torch.equal(
        split(joined, HERE), by_hand(joined.view(2, 3, 4, 2), np.s_[..., [1, 3], :], lambda x: x + 1).flatten(2)
    )


@pytest.mark.parametrize(
    ("chosen", "shape", "said"),
    [
        ({"positions": 4}, (3, 4, 2), "positions=4 is outside of the 4 that there are"),
        ({"positions": [0, -5]}, (3, 4, 2), "positions=-5 is outside of the 4"),
        ({"positions": [1, -3]}, (3, 4, 2), "names one twice among 4"),
        ({"positions": torch.tensor([1, 1, 0, 0])}, (3, 4, 2), "A mask is of booleans: mask.bool()."),
        ({"positions": torch.tensor([[1, 1, 1, 0]] * 3)}, (3, 4, 2), "A mask is of booleans: mask.bool()."),
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
    with pytest.raises(EditError, match=r"h.3#0: edits.only: .*") as caught:
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
        ({"heads": (2, 12)}, r"a list, \[2, 12\], chooses several heads; edits.along"),
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
    edit = edits.only(
        edits.add(torch.ones(2)), positions=[1, -1], heads=edits.along(3, dim=-1, count=12), steps=slice(1, None)
    )
    assert repr(edit) == (
        "edits.only(edits.add(tensor([1.0, 1.0])), positions=[1, -1], heads=edits.along(3, 12, dim=-1), "
        "steps=slice(1, None, None))"
    ).replace("along(3, 12, dim=-1)", "along(3, -1, 12)")
    assert (
        repr(edits.only([edits.zero(), edits.scale(2)], rows=0)) == "edits.only([edits.zero(), edits.scale(2)], rows=0)"
    )
    for one in (edit, edits.only(edits.zero(), positions=MASK), edits.only(edits.zero(), positions=[[1], [2]])):
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert hash(again) == hash(one)
        assert repr(again) == repr(one)
    assert edits.only(edits.zero(), positions=range(2)) == edits.only(edits.zero(), positions=torch.tensor([0, 1]))
    assert edits.only(edits.zero(), positions=0) != edits.only(edits.zero(), rows=0)


def test_a_pass_outside_of_a_generation_is_step_0() -> None:
    x = value(2, 3, 2)
    assert torch.equal(edits.only(edits.zero(), steps=0)(x, HERE), torch.zeros_like(x))
    assert edits.only(edits.zero(), steps=slice(1, None))(x, HERE) is None


# -- other kinds of runs ----------------------------------------------------------------------------------------------


def test_steps_are_refused_where_nobody_counts_them() -> None:
    model = nn.Sequential(nn.Identity())
    for edit in (edits.only(edits.zero(), steps=0), [edits.at("", edits.only(edits.zero(), steps=0, rows=0))]):
        with pytest.raises(SessionError, match="steps are counted in one thread only"):
            th.edit(model, {"0": edit}, threads="all")


@pytest.mark.parametrize("name", CHOICES)
def test_tensors_without_numbers_keep_their_shape(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    edit = edits.only(edits.add(torch.ones(2)), **CHOICES[name][0])
    assert edit(torch.empty(3, 4, 2, device="meta"), HERE).shape == (3, 4, 2)
    with FakeTensorMode():
        assert edit(torch.empty(3, 4, 2), HERE).shape == (3, 4, 2)


def test_memory_of_any_layout_is_changed_as_indexing_by_hand_does() -> None:
    permuted, expanded = torch.randn(4, 6, 3).permute(2, 0, 1), torch.randn(3, 1, 6).expand(3, 4, 6)
    for x in (permuted, expanded, torch.randn(3, 8, 6)[:, ::2]):
        edit = edits.only(edits.scale(2), positions=[0, -1], heads=edits.along(1, dim=-1, count=3))
        expected = x.clone().contiguous().view(3, 4, 3, 2)
        expected[:, [0, -1], 1] *= 2
        assert torch.equal(edit(x, HERE), expected.flatten(2))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # said once in a process
def test_quantized_values_are_changed_in_the_part_alone() -> None:
    given = torch.quantize_per_tensor(torch.randn(2, 3, 4), 0.1, 0, torch.qint8)
    edited = edits.only(edits.zero(), positions=1)(given, HERE).int_repr()
    assert torch.equal(edited, by_hand(given.int_repr(), np.s_[:, 1:2], torch.zeros_like))


def test_gradients_are_edited_in_a_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with th.edit(model, {"0:grad": edits.only(edits.zero(), positions=-1)}):
        with th.capture(model, "0:grad") as rec:
            model(torch.randn(3, 4, 2)).sum().backward()
    assert not rec["0:grad"][:, -1].any()
    assert rec["0:grad"][:, :-1].all()


def test_lines_of_other_lengths_are_told_to_be_a_mask() -> None:
    with pytest.raises(ValueError, match=r"lines .* equally long, and these have \[2, 1\].* boolean mask"):
        edits.only(edits.zero(), positions=[[1, 2], [3]])
