"""How far a run is ahead of its device; that of a real one is tried in ``tests/gpu``."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from torchhook._extract import task


class Event:
    """Of a device that is never done with anything before somebody waits for it."""

    recorded: list[int] = []
    done = -1

    def __init__(self) -> None:
        self.at = -1

    def record(self, stream: object) -> None:
        self.at = len(Event.recorded)
        Event.recorded.append(self.at)

    def synchronize(self) -> None:
        Event.done = max(Event.done, self.at)


@pytest.fixture
def run(monkeypatch):
    Event.recorded, Event.done = [], -1
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    made = task._Run.__new__(task._Run)
    made.device, made.started = torch.device("cuda"), deque()
    return made


def test_a_run_stays_a_few_batches_ahead_of_a_device(run):
    ahead = []
    for batch in range(40):
        run._keep_pace()
        ahead.append(batch - Event.done)
    assert max(ahead) == task.AHEAD + 1
    assert ahead[: task.AHEAD + 1] == list(range(1, task.AHEAD + 2))  # the first ones wait for nothing
    assert len({id(event) for event in run.started}) == task.AHEAD + 1


def test_on_the_host_there_is_nothing_to_keep_pace_with(run):
    run.device = torch.device("cpu")
    run._keep_pace()
    assert Event.recorded == []
