"""Masks among the arguments of a call, and which site each is about."""

from __future__ import annotations

import pytest
import torch

from torchhook._values.call_masks import look_padded, masks_in
from torchhook._values.tree import Inputs

IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def names(*args, parameters=(), also=None, **kwargs):
    return sorted(masks_in(Inputs(args, kwargs), parameters, also).masks)


def test_masks_are_found_by_name_place_and_inside_a_batch():
    assert names(input_ids=IDS, attention_mask=MASK) == ["attention_mask"]
    assert names(IDS, MASK, parameters=["input_ids", "attention_mask"]) == ["attention_mask"]
    assert names({"input_ids": IDS, "attention_mask": MASK}, parameters=["batch"]) == ["attention_mask"]
    assert names(IDS, MASK, parameters=["x", "mask"]) == ["mask"]
    assert names(IDS, also={"attention_mask": MASK}) == ["attention_mask"]


def test_what_is_no_mask_of_rows_is_not_taken_for_one():
    assert names(input_ids=IDS, attention_mask=MASK[:, None].expand(2, 3, 3)) == []
    assert names(input_ids=IDS, attention_mask=torch.tensor([[0.0, 0.5, -1e9]] * 2)) == []
    assert names(input_ids=IDS, attention_mask=torch.zeros(2, 3)) == []  # to be added
    assert names(input_ids=IDS, token_type_ids=MASK) == []
    assert names(IDS, also={"mask": MASK[:, :2]}) == []
    # Beside one for padding, it says who may attend to whom.
    parameters = ["src", "mask", "src_key_padding_mask"]
    assert names(IDS, MASK, MASK == 0, parameters=parameters) == ["src_key_padding_mask"]
    found = masks_in(Inputs((IDS, None, MASK == 0), {}), parameters).masks
    assert torch.equal(found["src_key_padding_mask"], MASK.bool())
    added = torch.where(MASK == 0, -torch.inf, 0.0)
    assert torch.equal(
        masks_in(Inputs((), {"src": IDS, "src_key_padding_mask": added}), []).masks["src_key_padding_mask"], MASK.bool()
    )


@pytest.mark.parametrize(
    ("path", "arguments", "expected"),
    [
        ("encoder.layer.0", {}, ["attention_mask"]),
        ("decoder.layers.0", {}, ["attention_mask"]),  # a decoder alone
        ("decoder.block.0", {"decoder_input_ids": IDS}, None),
        ("decoder.block.0", {"decoder_input_ids": IDS, "decoder_attention_mask": MASK}, ["decoder_attention_mask"]),
        ("encoder.block.0", {"decoder_input_ids": IDS, "decoder_attention_mask": MASK}, ["attention_mask"]),
        ("", {"decoder_input_ids": IDS, "decoder_attention_mask": MASK}, ["attention_mask", "decoder_attention_mask"]),
        ("vision_model.encoder.layers.0", {"pixel_values": torch.zeros(2, 3, 8, 8)}, None),
        ("text_model.encoder.layers.0", {"pixel_values": torch.zeros(2, 3, 8, 8)}, ["attention_mask"]),
        ("decoder.bert.encoder.layer.0", {"decoder_attention_mask": MASK}, ["decoder_attention_mask"]),
    ],
)  # fmt: skip
def test_a_site_has_the_mask_of_its_part_of_the_model(path, arguments, expected):
    found = masks_in(Inputs((), {"input_ids": IDS, "attention_mask": MASK, **arguments}), []).of_site(path)
    assert (found and [name for name, _ in found.masks]) == expected


@pytest.mark.parametrize(
    ("ids", "pads", "padded"),
    [
        ([[5, 6, 7], [8, 1, 1]], {1}, True),
        ([[5, 6, 7], [1, 8, 9]], {1}, True),
        ([[5, 6, 1], [8, 9, 1]], {1}, False),  # the end of every sentence
        ([[5, 6, 7], [8, 0, 0]], set(), True),
        ([[5, 6, 7], [8, 9, 0]], set(), False),  # one may be a token
        ([[5, 0, 0, 7], [8, 9, 9, 9]], set(), False),
        ([[5], [0]], set(), False),
    ],
)
def test_rows_that_look_padded(ids, pads, padded):
    likely = () if pads else (0,)
    assert look_padded(Inputs((torch.tensor(ids),), {}), pads, likely) is padded


def test_frames_of_zeros_look_padded():
    frames = torch.ones(2, 5, 3)
    assert not look_padded(Inputs((frames,), {}), ())
    frames[1, 3:] = 0
    assert look_padded(Inputs((frames,), {}), ())
    assert not look_padded(Inputs((torch.zeros(2, 3, 4, 4),), {}), ())


ADDED = torch.where(MASK == 0, -torch.inf, 0.0)


@pytest.mark.parametrize(
    "mask", [ADDED, ADDED.clamp(min=-1e4), MASK[:, None, None], MASK[:, None] == 1, ADDED[:, None, None]]
)
def test_masks_that_are_added_or_have_dims_for_heads_and_queries_are_read(mask):
    found = masks_in(Inputs((), {"input_ids": IDS, "attention_mask": mask}), [])
    assert torch.equal(found.masks["attention_mask"], MASK.bool())
    assert not found.unread


@pytest.mark.parametrize(
    ("name", "mask", "unread"),
    [
        ("attention_mask", MASK[:, None].expand(2, 3, 3), True),
        ("attention_mask", MASK[:, None, None].expand(2, 1, 3, 3), True),
        ("attention_mask", torch.ones(2, 1, 3, 3).tril(), False),  # of all rows the same: not about their padding
        ("attention_mask", torch.ones(3, 3).tril(), False),
        ("attention_mask", torch.where(MASK == 0, -2.5, 0.5), True),
        ("padding_mask", MASK == 0, True),  # or the other way round: who knows
        ("padding_mask", MASK[:1], False),
        ("loss_mask", MASK, False),
    ],
)
def test_masks_that_cannot_be_read_are_known_to_be_there(name, mask, unread):
    found = masks_in(Inputs((), {"input_ids": IDS, name: mask}), [])
    assert not found.masks
    assert found.unread is unread


def test_who_may_attend_to_whom_is_no_padding_though_there_be_as_many_rows_as_positions():
    ids, causal = torch.ones(3, 3, dtype=torch.long), torch.ones(3, 3).tril()
    for mask in (causal, causal.bool(), causal.T, causal - causal.tril(-2)):
        found = masks_in(Inputs((), {"input_ids": ids, "attention_mask": mask}), [])
        assert not found.masks
        assert found.unread
    lengths = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    assert names(input_ids=ids, attention_mask=lengths) == ["attention_mask"]
