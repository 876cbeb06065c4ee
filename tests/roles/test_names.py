"""``roles`` itself: whose errors are spoken of, and whose are only a reason to find nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.roles_models import build
from torchhook._roles import attention, blocks, find, proof
from torchhook.errors import MissingRecordError, SelectorError
from torchhook.types import Roles, Site

IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(x)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("a mistake of ours")


@pytest.mark.parametrize(
    "place", [(find, "_named"), (attention, "read"), (blocks, "_kinds"), (proof.Judge, "with_edits")]
)
@pytest.mark.parametrize("table", [None, {"@mine": "model.norm"}])
def test_a_mistake_in_the_search_is_not_taken_for_a_model_without_names(
    place: tuple[Any, str], table: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, broken)
    model = build("llama")
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        th.roles(model, table=table)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        th.capture(model, "@resid_post.0")


@pytest.mark.parametrize("ways", [1, 4, 5])
def test_a_mistake_while_names_are_tried_is_not_taken_for_a_call_that_the_model_refuses(
    ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the runs, the first two are on inputs, then come ways to call a model that are guessed, then training."""
    count, run = [0], proof.Judge._run

    def late(self: proof.Judge, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return broken() if count[0] > ways else run(self, *args, **kwargs)

    monkeypatch.setattr(proof.Judge, "_run", late)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        th.roles(build("llama"))


def test_a_model_that_refuses_a_call_that_was_guessed_has_its_names() -> None:
    class Strict(type(build("llama"))):  # type: ignore[misc]
        """Takes no mask and no cache, and does not run in training mode."""

        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, **rest: Any
        ) -> Any:
            if attention_mask is not None or past_key_values is not None or self.training:
                raise KeyError("not so")
            return super().forward(input_ids, **rest)

    model = build("llama")
    expected = dict(th.roles(model))
    model.__class__ = Strict
    assert dict(th.roles(model)) == expected


def test_a_table_of_ones_own_stands_alone_where_the_model_does_not_run_by_itself() -> None:
    class Picky(type(build("llama"))):  # type: ignore[misc]
        """Needs more than its config says."""

        def forward(self, input_ids: Tensor, image: Tensor | None = None, **rest: Any) -> Any:
            assert image is not None, "an image, please"
            return super().forward(input_ids, **rest)

    model = build("llama")
    model.__class__ = Picky
    assert dict(th.roles(model, table={"@mine": "model.norm"})) == {"@mine": "model.norm"}
    with pytest.raises(
        SelectorError, match=r"(?s)did not run with inputs made.*an image, please.*th\.roles\(model, inputs\)"
    ):
        th.roles(model)
    inputs = {"input_ids": IDS, "image": torch.ones(1)}
    assert th.roles(model, inputs, table={"@mine": "model.norm"})["@resid_post.0"] == "model.layers.0"
    with pytest.raises(AssertionError, match="an image, please"):
        th.roles(model, {"input_ids": IDS}, table={"@mine": "model.norm"})


def test_a_table_alone_is_enough_for_a_model_that_does_not_say_how_it_is_called() -> None:
    model = nn.Sequential(Block(), Block())
    assert dict(th.roles(model, table={"@mine": "0.ff"})) == {"@mine": "0.ff"}
    with pytest.raises(
        SelectorError, match=r"Sequential does not say with which inputs it runs.*call th\.roles\(model, inputs\) first"
    ):
        th.roles(model)


def test_one_name_is_not_called_names() -> None:
    assert str(th.roles(nn.Sequential(Block(), Block()), table={"@mine": "0.ff"})).startswith(
        "Roles of Sequential: 1 name\n"
    )


def test_names_are_got_as_from_any_mapping_and_missing_ones_come_with_what_is_near() -> None:
    found = Roles({"resid_post.0": Site("h.0")}, {"pattern.2": "nobody makes one"}, "Net")
    assert found.get("@resid_post.0") == found.get("resid_post.0") == "h.0"
    nothing: list[Any] = [found.get("@pattern.2"), found.get("@resid_post.7")]
    assert nothing == [None, None]
    assert found.get("@pattern.2", "else") == "else"
    with pytest.raises(SelectorError, match=r"'@pattern.2' is not known to be anywhere in this model: nobody makes"):
        found["@pattern.2"]
    with pytest.raises(MissingRecordError, match=r"^no role '@resid_pots.0'. Closest: '@resid_post.0'.$") as error:
        found["resid_pots.0"]
    assert isinstance(error.value, KeyError)
