"""Copies from a GPU on a side stream: true once they are waited for, and of the values at the moment of the call."""

from __future__ import annotations

import gc
import weakref

import torch

from torchhook._values.host_copies import HostCopies

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


def test_fresh_copies_are_pinned_and_true_after_the_wait() -> None:
    torch.manual_seed(0)
    copies = HostCopies()
    sources = [torch.randn(1 << 20, device="cuda") for _ in range(20)]
    copied = [copies.copy(source) for source in sources]
    copies.wait()
    assert all(host.is_pinned() for host in copied)
    assert all(torch.equal(host, source.cpu()) for host, source in zip(copied, sources, strict=True))


def test_a_copy_comes_after_the_work_that_makes_its_source() -> None:
    copies, square = HostCopies(), torch.randn(2048, 2048, device="cuda")
    made = square
    for _ in range(20):
        made = torch.nn.functional.normalize(made @ square)
    host = copies.copy(made)
    copies.wait()
    assert torch.equal(host, made.cpu())


def test_copies_into_pinned_memory_are_over_when_their_events_are() -> None:
    copies = HostCopies()
    room = torch.zeros(40, 1 << 16, pin_memory=True)
    sources = [torch.full((2, 1 << 16), float(i), device="cuda") for i in range(20)]
    for i, source in enumerate(sources):
        copies.copy(source, into=room[2 * i : 2 * i + 2])
    for event in copies.events():
        event.synchronize()
    assert torch.equal(room, torch.arange(20.0).repeat_interleave(2)[:, None].expand_as(room))


def test_a_source_is_held_until_its_copy_is_done() -> None:
    copies = HostCopies()
    torch.cuda._sleep(200_000_000)  # the side stream waits for this
    source = torch.ones(1 << 20, device="cuda")
    alive = weakref.ref(source)
    host = copies.copy(source)
    del source
    gc.collect()
    assert alive() is not None
    copies.wait()
    gc.collect()
    assert alive() is None
    assert bool((host == 1).all())
