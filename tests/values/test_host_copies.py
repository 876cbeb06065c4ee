"""Copies to the host: from the host at once; from a device, here a pretended one that runs when it is told to.

Those from a real GPU are tried in ``tests/gpu``.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from torchhook._values import host_copies
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
    copies.settle()
    assert copies.events() == []


# -- a device that does what CUDA promises, as late as it may -----------------------------------------


class Machine:
    """Streams whose work is done only when somebody waits for it: whatever relies on luck, goes wrong here."""

    def __init__(self, most: int) -> None:
        self.current_device, self.waits = 0, 0
        self.main = [Stream(device) for device in (0, 1)]
        self.current = list(self.main)
        self.memory = most * host_copies._SHARE
        self.allocator = "native"

    def set_stream(self, stream: Stream) -> None:
        self.current_device = stream.device
        self.current[stream.device] = stream


class Stream:
    def __init__(self, device: int = 0) -> None:
        self.device, self.work, self.done = device, [], 0

    def submit(self, work) -> None:
        self.work.append(work)

    def wait_event(self, event: Event) -> None:
        position = event.position
        self.submit(lambda: Event.reach(position))

    def run(self, until: int) -> None:
        while self.done < until:
            work = self.work[self.done]
            work()
            self.done += 1


class Event:
    machine: Machine

    def __init__(self) -> None:
        self.position = None

    def record(self, stream: Stream) -> None:
        self.position = stream, len(stream.work)

    def query(self) -> bool:
        return self.position is None or self.position[0].done >= self.position[1]

    def synchronize(self) -> None:
        Event.machine.waits += 1
        Event.reach(self.position)

    @staticmethod
    def reach(position) -> None:
        if position is not None:
            position[0].run(position[1])


class OnDevice:
    """A tensor there, filled when its stream comes to it."""

    is_cuda = True

    def __init__(self, machine: Machine, device: int = 0, nbytes: int = 8) -> None:
        self.device, self.nbytes, self.value = device, nbytes, None
        self.machine = machine
        self.readers: list[Stream] = []
        self.is_alone = self.is_of_torch = True

    def record_stream(self, stream: Stream) -> None:
        self.readers.append(stream)

    def get_device(self) -> int:
        return self.device

    def write(self, value: int) -> OnDevice:
        self.machine.main[self.device].submit(lambda: setattr(self, "value", value))
        return self


class Host:
    value = None

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def copy_(self, source: OnDevice, non_blocking: bool) -> None:
        self.machine.current[source.device].submit(lambda: setattr(self, "value", source.value))


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Event.machine = Machine(most=100)
    monkeypatch.setattr(host_copies, "_lanes", {})
    monkeypatch.setattr(host_copies, "_TOGETHER", 16)  # two of the values here
    monkeypatch.setattr(host_copies, "_WORTH", 8)
    monkeypatch.setattr(host_copies, "current_raw_stream", lambda device: id(made.current[device]))
    monkeypatch.setattr(host_copies.os, "register_at_fork", lambda before: None)
    monkeypatch.setattr(host_copies, "start_of", id)
    monkeypatch.setattr(host_copies, "is_only_owner", lambda source: source.is_alone)
    monkeypatch.setattr(host_copies, "is_freed_by_torch", lambda source: source.is_of_torch)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_device": lambda: made.current_device,
        "current_stream": lambda device: made.current[device],
        "set_stream": made.set_stream,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=made.memory),
        "device": lambda device: _chosen(made, device),
        "get_allocator_backend": lambda: made.allocator,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


class _chosen:
    def __init__(self, machine: Machine, device: int) -> None:
        self.machine, self.device = machine, device

    def __enter__(self) -> None:
        self.before, self.machine.current_device = self.machine.current_device, self.device

    def __exit__(self, *details: object) -> None:
        self.machine.current_device = self.before


def test_values_are_those_that_were_made_once_they_are_waited_for(machine) -> None:
    copies, hosts = HostCopies(), [Host(machine) for _ in range(5)]
    for number, host in enumerate(hosts):
        copies.copy(OnDevice(machine).write(number), into=host)
    assert [host.value for host in hosts] == [None] * 5
    copies.wait()
    assert [host.value for host in hosts] == [0, 1, 2, 3, 4]
    assert machine.current[0] is machine.main[0]


def test_nothing_is_waited_for_until_something_is_read(machine) -> None:
    copies = HostCopies()
    for number in range(50):
        copies.copy(OnDevice(machine).write(number), into=Host(machine))
    copies.settle()
    assert machine.waits == 0
    copies.wait()
    assert machine.waits > 0


def test_what_is_written_after_the_sources_are_let_go_comes_after_the_copies(machine) -> None:
    copies, host, source = HostCopies(), Host(machine), OnDevice(machine, nbytes=4).write(1)
    copies.copy(source, into=host)
    copies.settle()
    source.write(2)
    machine.main[0].run(len(machine.main[0].work))  # the model runs on, and has never heard of the copy
    assert (source.value, host.value) == (2, 1)


def session(machine, values: range, owner: OnDevice | None = None, **told: bool) -> tuple[list[OnDevice], list[Host]]:
    """Values that are copied, and let go at once."""
    copies, hosts, sources = HostCopies(), [], []
    for value in values:
        source, host = OnDevice(machine).write(value), Host(machine)
        vars(source).update(told)
        copies.copy(source, into=host, shared_with=owner or OnDevice(machine))
        sources.append(source)
        hosts.append(host)
    copies.settle()
    assert copies._held() == 0
    return sources, hosts


def run_the_model(machine) -> None:
    machine.main[0].run(len(machine.main[0].work))


def test_the_model_runs_on_beside_the_copies_of_memory_whose_reader_torch_was_told(machine) -> None:
    sources, hosts = session(machine, range(3))
    run_the_model(machine)
    assert [host.value for host in hosts] == [None] * 3
    assert [source.readers for source in sources] == [[host_copies._lanes[0].stream]] * 3
    assert machine.waits == 0


def test_it_runs_ahead_by_one_session(machine) -> None:
    sessions = [session(machine, range(first, first + 3)) for first in (0, 3, 6)]
    run_the_model(machine)
    assert [[host.value for host in hosts] for _, hosts in sessions] == [[0, 1, 2], [3, 4, 5], [None] * 3]
    assert machine.waits == 0


@pytest.mark.parametrize("told", [{"is_alone": False}, {"is_of_torch": False}])
def test_it_waits_for_copies_of_memory_that_others_may_write_to_or_give_out(machine, told) -> None:
    sources, hosts = session(machine, range(3), **told)
    for source in sources:
        source.write(9)
    run_the_model(machine)
    assert [host.value for host in hosts] == [0, 1, 2]
    assert not any(source.readers for source in sources)


def test_whoever_shares_memory_with_a_living_tensor_is_not_moved_from_it(machine, monkeypatch) -> None:
    monkeypatch.setattr(host_copies, "is_only_owner", lambda source: pytest.fail("this would make a copy of it"))
    _, hosts = session(machine, range(3), owner=OnDevice(machine))
    run_the_model(machine)
    assert [host.value for host in hosts] == [0, 1, 2]


def test_what_sessions_leave_behind_is_bounded(machine) -> None:
    """100 bytes in all, 24 for each; the fifth time, the device waits until nothing is left."""
    sessions = [session(machine, range(3)) for _ in range(5)]
    assert [bool(sources[0].readers) for sources, _ in sessions] == [True] * 4 + [False]
    run_the_model(machine)
    assert all(host.value is not None for _, hosts in sessions for host in hosts)
    sources, _ = session(machine, range(3))
    assert sources[0].readers


def test_memory_that_several_values_share_is_told_of_once(machine, monkeypatch) -> None:
    monkeypatch.setattr(host_copies, "start_of", lambda source: 0)
    sources, _ = session(machine, range(3))
    assert [len(source.readers) for source in sources] == [0, 0, 1]


def test_an_allocator_that_does_not_heed_readers_is_not_told_of_any(machine) -> None:
    machine.allocator = "pluggable"
    sources, hosts = session(machine, range(3))
    for source in sources:
        source.write(9)
    run_the_model(machine)
    assert [host.value for host in hosts] == [0, 1, 2]
    assert not any(source.readers for source in sources)


def test_while_another_session_is_left_behind_the_device_waits(machine) -> None:
    session(machine, range(3))
    with host_copies._lanes[0]._leaving:
        sources, hosts = session(machine, range(3))
    run_the_model(machine)
    assert [host.value for host in hosts] == [0, 1, 2]
    assert not any(source.readers for source in sources)


class Interrupt:
    """Raises at one line of the file; ``came`` says whether there are so many.

    Not where a block is left: no interrupt comes between its last call and what leaves it.
    """

    LEAVING = ("with ", "try:", "torch.cuda.set_stream(current)")

    def __init__(self, at: int) -> None:
        self.left, self.came = at, False

    def __call__(self, frame, event, arg):
        return self.at_line if frame.f_code.co_filename == host_copies.__file__ else None

    def at_line(self, frame, event, arg):
        line = linecache.getline(host_copies.__file__, frame.f_lineno).strip()
        if event == "line" and not line.startswith(self.LEAVING):
            self.left -= 1
            if self.left == 0:
                self.came = True
                raise KeyboardInterrupt
        return self.at_line


def interrupted(machine, at: int) -> bool:
    """A session that is interrupted at one line, and closed again as sessions are; whether there was such a line."""
    host_copies._lanes.clear()
    machine.main[:] = machine.current[:] = Stream(0), Stream(1)
    copies, done, interrupt = HostCopies(), [], Interrupt(at)
    sys.settrace(interrupt)
    try:
        for value in range(5):
            source, host = OnDevice(machine).write(value), Host(machine)
            copies.copy(source, into=host)
            done.append((source, host))
        copies.settle()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    copies.settle()
    assert copies._held() == 0
    for source, _ in done:
        if not source.readers:  # nobody knows of any: the memory is given out again
            source.write(9)
    run_the_model(machine)
    copies.wait()
    assert [host.value for _, host in done] == list(range(len(done))), at
    assert machine.current == machine.main
    return interrupt.came


def test_an_interrupt_at_any_line_leaves_true_values_and_no_source_behind(machine) -> None:
    lines = next(at for at in itertools.count(1) if not interrupted(machine, at))
    assert lines > 200


def test_bytes_on_their_way_are_bounded_by_waits_of_the_device_alone(machine) -> None:
    copies, held = HostCopies(), []
    hosts = [Host(machine) for _ in range(40)]
    for number, host in enumerate(hosts):
        copies.copy(OnDevice(machine, nbytes=30).write(number), into=host)
        held.append(sum(one.nbytes for group in copies._started for one, _ in group.values))
    assert max(held) <= 100
    assert held[-1] == copies._held()
    assert machine.waits == 0
    copies.wait()
    assert [host.value for host in hosts] == list(range(40))
    assert copies._held() == 0


def test_a_value_on_another_device_leaves_the_current_one_as_it_was(machine) -> None:
    copies, hosts = HostCopies(), [Host(machine), Host(machine)]
    for device, host in enumerate(hosts):
        copies.copy(OnDevice(machine, device).write(7 + device), into=host)
        assert machine.current_device == 0
        assert machine.current == machine.main
    assert len(copies.events()) == 2
    copies.wait()
    assert [host.value for host in hosts] == [7, 8]


def test_a_copy_that_fails_leaves_the_stream_as_it_was(machine) -> None:
    class Full(Host):
        def copy_(self, source: OnDevice, non_blocking: bool) -> None:
            raise RuntimeError("no memory")

    copies, before = HostCopies(), Host(machine)
    copies.copy(OnDevice(machine).write(2), into=before)
    with pytest.raises(RuntimeError, match="no memory"):
        copies.copy(OnDevice(machine), into=Full(machine))
    assert machine.current == machine.main
    copies.copy(OnDevice(machine).write(3), into=(host := Host(machine)))
    copies.wait()
    assert (before.value, host.value) == (2, 3)


@pytest.mark.parametrize("nbytes", [1, 8, 16])
def test_a_value_that_comes_while_others_are_started_is_copied_after_it_was_made(machine, nbytes) -> None:
    """As from a user's code that the garbage collector runs."""
    copies, late = HostCopies(), Host(machine)

    class Collects(Host):
        def copy_(self, source: OnDevice, non_blocking: bool) -> None:
            super().copy_(source, non_blocking)
            side, machine.current[0] = machine.current[0], machine.main[0]  # it has a stream of its own
            copies.copy(OnDevice(machine, nbytes=nbytes).write(7), into=late)
            machine.current[0] = side

    hosts = [Host(machine), Collects(machine)]
    for number, host in enumerate(hosts):
        copies.copy(OnDevice(machine).write(number), into=host)
    copies.wait()
    assert [host.value for host in (*hosts, late)] == [0, 1, 7]


def test_events_are_used_again(machine) -> None:
    for _ in range(10):
        copies = HostCopies()
        for number in range(4):
            copies.copy(OnDevice(machine).write(number), into=Host(machine))
        copies.wait()
    assert len(host_copies._lanes[0].unused) == 4  # of two groups, two each


def test_small_values_are_started_together_and_a_large_one_at_once(machine) -> None:
    copies = HostCopies()
    side = []
    for nbytes in (4, 4, 4, 4, 40, 8):
        copies.copy(OnDevice(machine, nbytes=nbytes).write(nbytes), into=Host(machine))
        side.append(len(host_copies._lanes[0].stream.work))
    # A wait, and then the copies of a group.
    assert side == [0, 0, 0, 5, 7, 7]
    copies.settle()
    assert len(host_copies._lanes[0].stream.work) == 9


def test_the_last_ones_do_not_wait_for_what_the_model_does_after_them(machine) -> None:
    copies, host = HostCopies(), Host(machine)
    copies.copy(OnDevice(machine).write(1), into=host)
    late = OnDevice(machine).write(2)
    copies.events()
    host_copies._lanes[0].stream.run(len(host_copies._lanes[0].stream.work))
    assert host.value == 1
    assert late.value is None


@pytest.mark.parametrize("sizes", [(8, 1), (1, 8), (1, 1)])
def test_a_small_value_is_copied_after_it_was_made_whatever_was_made_before(machine, sizes) -> None:
    copies, hosts = HostCopies(), [Host(machine), Host(machine)]
    for number, (size, host) in enumerate(zip(sizes, hosts, strict=True)):
        copies.copy(OnDevice(machine, nbytes=size).write(number), into=host)
    copies.events()
    host_copies._lanes[0].stream.run(len(host_copies._lanes[0].stream.work))
    assert [host.value for host in hosts] == [0, 1]


def test_values_of_two_streams_are_two_groups(machine) -> None:
    copies, hosts, other = HostCopies(), [Host(machine), Host(machine)], Stream()
    copies.copy(OnDevice(machine, nbytes=1).write(1), into=hosts[0])
    machine.current[0] = other
    second = OnDevice(machine, nbytes=1)
    other.submit(lambda: setattr(second, "value", 2))
    copies.copy(second, into=hosts[1])
    assert machine.current[0] is other
    copies.wait()
    assert [host.value for host in hosts] == [1, 2]


def test_two_threads_that_read_at_once_both_wait_for_all(machine) -> None:
    copies, host = HostCopies(), Host(machine)
    reached, go = threading.Event(), threading.Event()
    copies.copy(OnDevice(machine).write(5), into=host)

    class Slow(Event):
        def synchronize(self) -> None:
            reached.set()
            go.wait(10)
            super().synchronize()

    copies.events()  # which starts it
    copies._started[0].done.__class__ = Slow
    one = threading.Thread(target=copies.wait)
    one.start()
    assert reached.wait(10)
    seen = []
    other = threading.Thread(target=lambda: (copies.wait(), seen.append(host.value)))
    other.start()
    other.join(0.2)
    assert seen == []  # not while the first one still waits
    go.set()
    one.join(10)
    other.join(10)
    assert seen == [5]


def test_before_a_fork_everything_is_waited_for(machine) -> None:
    copies, host = HostCopies(), Host(machine)
    copies.copy(OnDevice(machine).write(9), into=host)
    host_copies._wait_for_all()
    assert host.value == 9
