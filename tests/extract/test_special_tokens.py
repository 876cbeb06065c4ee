"""Which ids are special, which tensor of a batch are the ids, and which tokens are left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchhook._extract.special_tokens import Left, TokenIds, special_ids, without
from torchhook._values.tree import Inputs
from torchhook.errors import ExtractError

IDS = torch.tensor([[1, 5, 6, 0], [1, 7, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class Model(nn.Module):
    def __init__(self, *inside: nn.Module, **config: Any) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        if config:
            self.config = type("Config", (), config)()


# -- which are special ---------------------------------------------------------------------------------------


def test_special_ids_are_those_of_the_configuration() -> None:
    model = Model(bos_token_id=1, eos_token_id=[2, 7], pad_token_id=None, cls_token_id=5)
    assert special_ids(model, True) == {1, 2, 5, 7}
    assert special_ids(model, False) is None


@pytest.mark.parametrize(
    "drop", [[3, 4], (4, 3, 3), {3, 4}, range(3, 5), torch.tensor([3, 4]), np.array([3, 4]), [np.int64(3), 4]]
)
def test_special_ids_may_be_given(drop: Any) -> None:
    assert special_ids(Model(), drop) == {3, 4}


def test_no_ids_are_an_answer_too() -> None:
    assert special_ids(Model(), []) == frozenset()
    assert without(frozenset()) == ", without the tokens []"


@pytest.mark.parametrize(
    "drop",
    [
        *("12", "<s>", b"12", ["1"], [1.5], 5, 0, None, [None], [True], {1: 2}, [[1]], 1.0),
        *(torch.tensor(1), torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1, 2]]), np.array([1.5])),
    ],
    ids=str,
)
def test_what_is_no_list_of_ids_is_refused(drop: Any) -> None:
    with pytest.raises(TypeError, match=r"^drop_special=.*tokenizer.all_special_ids"):
        special_ids(Model(), drop)


def test_a_configuration_that_knows_padding_alone_is_no_answer() -> None:
    with pytest.raises(ExtractError, match="names no special tokens but padding"):
        special_ids(Model(pad_token_id=0, bos_token_id=None), True)


def test_the_configuration_of_a_model_inside_is_found() -> None:
    inner = Model(Model(bos_token_id=9), bos_token_id=1, eos_token_id=2)
    assert special_ids(Model(inner), True) == {1, 2}
    assert special_ids(Model(Model(nn.Linear(1, 1)), Model(inner), pad_token_id=0), True) == {1, 2}
    with pytest.raises(ExtractError, match="different special tokens"):
        special_ids(Model(inner, Model(bos_token_id=3)), True)


# -- which tensor are the ids ------------------------------------------------------------------------------------


def test_ids_are_known_by_their_name_or_by_being_no_mask() -> None:
    embeds = torch.randn(2, 4, 3)
    for call, parameters in (
        (Inputs((IDS,), {}), []),
        (Inputs((IDS, MASK), {}), []),
        (Inputs((MASK, IDS), {}), ["mask", "x"]),
        (Inputs((embeds, MASK, IDS), {}), []),
        (Inputs(({"attention_mask": MASK, "input_ids": IDS},), {}), ["batch"]),
        (Inputs(({"attention_mask": MASK, "input_ids": IDS},), {}), []),
        (Inputs((), {"attention_mask": MASK, "tokens": IDS}), []),
        (Inputs((MASK,), {"input_ids": IDS}), ["position_ids"]),
    ):
        (found,) = TokenIds(call, parameters).of_site("h.0")
        assert torch.equal(found, IDS)
    (found,) = TokenIds(Inputs((MASK,), {}), ["x"]).of_site("h.0")
    assert torch.equal(found, MASK)  # ids of 0 and 1


def test_masks_positions_and_labels_are_no_ids() -> None:
    embeds = torch.randn(2, 4, 3)
    for call, parameters in (
        (Inputs((), {"inputs_embeds": embeds, "attention_mask": MASK}), ["input_ids", "attention_mask"]),
        (Inputs((), {"inputs_embeds": embeds, "anything": IDS}), []),
        (Inputs((embeds, MASK), {}), []),
        (Inputs((embeds, IDS), {}), ["x", "position_ids"]),
        (Inputs((embeds,), {"labels": IDS}), ["x", "labels"]),
        (Inputs((IDS > 0,), {}), ["x"]),
    ):
        assert TokenIds(call, parameters).of_site("h.0") == []


def test_a_decoder_has_its_own_ids() -> None:
    decoder = torch.tensor([[5, 1, 1, 9], [5, 5, 1, 1]])
    found = TokenIds(Inputs((), {"input_ids": IDS, "decoder_input_ids": decoder}), [])
    assert torch.equal(found.of_site("decoder.block.0")[0], decoder)
    assert torch.equal(found.of_site("encoder.block.0")[0], IDS)
    assert len(found.of_site("lm_head")) == 2
    # A decoder alone is all of a model.
    assert torch.equal(TokenIds(Inputs((IDS,), {}), ["input_ids"]).of_site("decoder.layers.0")[0], IDS)
    made_inside = TokenIds(Inputs((IDS,), {}), ["input_ids", "decoder_input_ids"])
    assert made_inside.of_site("decoder.block.0") == made_inside.of_site("lm_head") == []


def test_two_that_fit_must_leave_the_same_tokens() -> None:
    value: Tensor = torch.tensor([[1, 9, 9, 9], [1, 9, 9, 9]])
    same = Left("lm_head", None, [IDS, value], frozenset([1]))
    mask = same.kept(2, 4)
    assert mask is not None
    assert torch.equal(mask, IDS != 1)
    with pytest.raises(ExtractError, match="both fit the value, and differ"):
        Left("lm_head", None, [IDS, value], frozenset([1, 9])).kept(2, 4)
