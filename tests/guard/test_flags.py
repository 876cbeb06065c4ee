"""Flags: which of many tensors are not finite, in their order, by what a device wrote down about each."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor

from torchhook._guard.flags import Flags

VALUES: dict[str, list[float]] = {
    "NaN": [1.0, math.nan, math.inf],
    "+Inf": [1.0, math.inf],
    "-Inf": [-math.inf, -math.inf],
    "+Inf, -Inf": [math.inf, -math.inf, 0.0],
    "": [torch.finfo(torch.bfloat16).min] * 64,
}


def noted(flags: Flags[str], by_device: bool, dtype: torch.dtype) -> None:
    for what, values in VALUES.items():
        tensor = torch.tensor(values, dtype=dtype)
        (flags.write_down if by_device else flags.note)(tensor, what)


@pytest.mark.parametrize("by_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_not_finite_is_told_in_order_and_by_kind(by_device: bool, dtype: torch.dtype) -> None:
    flags: Flags[str] = Flags()
    for _ in range(3):  # the same places are used again
        noted(flags, by_device, dtype)
        assert [(bad.where, bad.what) for bad in flags.read()] == [(what, what) for what in VALUES if what]
        assert flags.read() == []


def test_places_are_added_where_they_do_not_suffice() -> None:
    flags: Flags[int] = Flags()
    for _ in range(2):
        for i in range(700):
            flags.write_down(torch.tensor([math.nan if i in (3, 255, 256, 699) else float(i)]), i)
        assert [bad.where for bad in flags.read()] == [3, 255, 256, 699]


def test_places_made_in_one_mode_serve_in_another() -> None:
    flags: Flags[int] = Flags()
    for mode in (torch.inference_mode(), contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode:
            flags.write_down(torch.tensor([math.inf]), 0)
            assert [bad.what for bad in flags.read()] == ["+Inf"]


def test_tensors_of_several_kinds_keep_their_order() -> None:
    flags: Flags[int] = Flags()
    tensors: list[Tensor] = [torch.tensor([math.nan], dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64)]
    for i, tensor in enumerate(tensors * 2):
        (flags.note if i % 2 else flags.write_down)(tensor, i)
    assert [bad.where for bad in flags.read()] == list(range(6))


def test_what_fails_to_be_written_down_takes_no_place() -> None:
    flags: Flags[int] = Flags()
    flags.write_down(torch.tensor([math.nan]), 0)
    flags.read()
    flags.note(torch.empty(0, 4), 1)
    flags.note(torch.empty(3, device="meta"), 2)
    flags.note(torch.ones(3, dtype=torch.int64), 3)
    assert flags.read() == []


def test_forgotten_flags_are_never_up() -> None:
    flags: Flags[str] = Flags()
    noted(flags, True, torch.float32)
    flags.forget()
    flags.write_down(torch.ones(2), "good")
    assert flags.read() == []
