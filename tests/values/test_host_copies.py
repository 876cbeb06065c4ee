"""Copies to the host, from the host: done at once. Those from a GPU are tried in ``tests/gpu``."""

from __future__ import annotations

import torch

from torchhook._values.host_copies import HostCopies


def test_a_fresh_copy_has_memory_of_its_own() -> None:
    copies, source = HostCopies(), torch.arange(6.0).reshape(2, 3).t()
    copied = copies.copy(source)
    expected = source.clone()
    source.zero_()
    assert torch.equal(copied, expected)
    assert copied.dtype == expected.dtype


def test_a_copy_into_given_memory_casts_and_fills_only_its_slice() -> None:
    room = torch.full((4, 2), -1.0, dtype=torch.float16)
    copied = HostCopies().copy(torch.ones(2, 2), into=room[1:3])
    assert copied.data_ptr() == room[1:].data_ptr()
    assert room.tolist() == [[-1, -1], [1, 1], [1, 1], [-1, -1]]


def test_there_is_nothing_to_wait_for() -> None:
    copies = HostCopies()
    copies.copy(torch.ones(2))
    copies.wait()
    assert copies.events() == []
