"""Copies from a GPU on a side stream: true once they are waited for, and of the values at the moment of the call."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn

import torchhook as th
from torchhook._values import host_copies
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


class Slow(nn.Module):
    """Its value is made long after the call has returned, and then overwritten by the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2048, 2048), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(100_000_000)
        return self.second(self.first(x)).mul_(3)


def test_what_is_read_after_the_session_is_whole_though_closing_it_did_not_wait() -> None:
    torch.manual_seed(0)
    model, x = Slow().cuda(), torch.randn(4096, 2048, device="cuda")
    with torch.no_grad():
        expected = model.first(x).cpu()
        with th.capture(model, "first", device="cpu") as rec:
            model(x)  # kernels are loaded, and there is pinned memory
        del rec
        torch.cuda.synchronize()
        with th.capture(model, "first", device="cpu") as rec:
            model(x)
        over = torch.cuda.Event()
        over.record()
        assert not over.query()  # the host is here before the device is
        assert torch.equal(rec["first"], expected)


def test_a_session_that_is_over_holds_no_memory_of_the_device() -> None:
    model, x = Slow().cuda(), torch.randn(4096, 2048, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        before, kept = torch.cuda.memory_allocated(), []
        for _ in range(5):
            with th.capture(model, "first", device="cpu") as rec:
                model(x)
            kept.append(rec)  # and not read
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        expected = model.first(x).cpu()
        assert all(torch.equal(rec["first"], expected) for rec in kept)


def test_memory_that_is_given_out_again_after_the_session_is_written_after_the_copy() -> None:
    model, x = Slow().cuda(), torch.randn(4096, 2048, device="cuda")
    with torch.no_grad():
        expected = model.first(x).cpu()
        with th.capture(model, "first", device="cpu") as rec:
            model(x)
        for _ in range(20):  # whatever was freed is overwritten
            torch.full((4096, 2048), -1.0, device="cuda")
        assert torch.equal(rec["first"], expected)


class Layers(nn.Module):
    """Values of 64 MB, each overwritten in place by the next layer; the last one is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def behind_a_busy_bus(model: nn.Module, x: torch.Tensor, sites: list[str], after: Callable[..., None]) -> th.Recording:
    """A session whose copies cannot start before the device has slept, and what is done at once when it is over."""
    copies = HostCopies()
    copies.copy(torch.zeros(1, device="cuda"))  # so that there is a lane
    copies.wait()
    with torch.cuda.stream(host_copies._lanes[0].stream):
        torch.cuda._sleep(400_000_000)
    with th.capture(model, sites, device="cpu") as rec:
        out = model(x)
        if after is dropped:
            del out
    after(None if after is dropped else out)
    return rec


def dropped(out: None) -> None:
    """Nobody but the session has had the values when it closes."""


def overwritten(out: torch.Tensor) -> None:
    out.fill_(-1)


@torch.no_grad()
def test_the_next_pass_runs_beside_the_copies_of_this_one() -> None:
    model, x = Layers().cuda(), torch.randn(8192, 2048, device="cuda")
    expected = {name: value.cpu() for name, value in (("first", model.first(x)), ("third", model(x)))}
    for _ in range(2):  # the first time, memory is pinned
        rec = behind_a_busy_bus(model, x, ["first", "third"], dropped)
        begun = torch.cuda.Event()
        begun.record()
        begun.synchronize()  # the pass is over, and so is what comes next on the device
        copied = torch.cuda.Event()
        copied.record(host_copies._lanes[0].stream)
        assert not copied.query()
        for _ in range(20):  # memory that is given out meanwhile is not what is still to be copied
            torch.full((8192, 2048), -1.0, device="cuda")
        assert all(torch.equal(rec[name], value) for name, value in expected.items())


@torch.no_grad()
def test_what_somebody_still_has_and_writes_to_is_copied_before() -> None:
    model, x = Layers().cuda(), torch.randn(8192, 2048, device="cuda")
    expected = {name: value.cpu() for name, value in (("first", model.first(x)), ("third", model(x)))}
    rec = behind_a_busy_bus(model, x, ["first", "third"], overwritten)
    assert all(torch.equal(rec[name], value) for name, value in expected.items())


@torch.no_grad()
def test_two_sites_with_the_same_memory_and_one_that_somebody_keeps_on_the_device() -> None:
    model, x = Layers().cuda(), torch.randn(8192, 2048, device="cuda")
    expected = model.first(x).relu().cpu()
    with th.capture(model, "second") as other:
        rec = behind_a_busy_bus(model, x, ["second", "third:input"], dropped)
    other["second"].fill_(-1)
    assert torch.equal(rec["second"], expected)
    assert torch.equal(rec["third:input"], expected)


@torch.no_grad()
def test_many_sessions_in_a_row_read_one_behind_or_not_at_all() -> None:
    model, inputs = Layers().cuda(), [torch.randn(8192, 2048, device="cuda") for _ in range(12)]
    expected = [(model.first(x).cpu(), model(x).cpu()) for x in inputs]
    for behind in (1, len(inputs)):
        open_ones: list[tuple[int, th.Recording]] = []
        for number, x in enumerate(inputs):
            with th.capture(model, ["first", "third"], device="cpu") as rec:
                model(x)
            open_ones.append((number, rec))
            if len(open_ones) > behind:
                at, rec = open_ones.pop(0)
                assert torch.equal(rec["first"], expected[at][0])
                assert torch.equal(rec["third"], expected[at][1])
        for at, rec in open_ones:
            assert torch.equal(rec["first"], expected[at][0])
            assert torch.equal(rec["third"], expected[at][1])


def test_values_of_many_threads_are_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=True)).cuda()
    inputs = [torch.randn(256, 512, device="cuda") for _ in range(6)]
    with torch.no_grad():
        expected = [model[0](x).cpu() for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                with th.capture(model, "0", device="cpu") as rec:
                    model(inputs[number])
                if not torch.allclose(rec["0"], expected[number], atol=1e-2):
                    wrong.append(number)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_maps_of_attention_on_their_way_to_the_host_are_waited_for() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, batch_first=True).cuda()
    x = torch.randn(16, 256, 256, device="cuda")
    expected = th.attention(layer, x)
    torch.cuda._sleep(100_000_000)
    found = th.attention(layer, x, device="cpu")
    for name in expected:
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], expected[name].cpu()), name
