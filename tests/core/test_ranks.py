"""Whether other ranks do the same, with a store that several pretend to share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from torchhook._core import ranks
from torchhook._core.ranks import Together
from torchhook._torch import sharded
from torchhook.errors import SessionError


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ranks in one process: who asks is said by ``world.rank``."""

    class World:
        rank = 0
        store = distributed.HashStore()

    here = World()
    monkeypatch.setattr(sharded, "rank_store", lambda: here.store)
    monkeypatch.setattr(distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(ranks, "_GRACE", 0.05)
    return here


def opened(world: Any, rank: int, what: str = "watched") -> Together:
    world.rank = rank
    together = Together(what)
    together.open()
    return together


def test_ranks_that_do_the_same_know_it(world: Any) -> None:
    first, second = opened(world, 0), opened(world, 1)
    assert second.missing(["group"]) == []
    world.rank = 0
    assert first.missing(["group"]) == []
    first.need(["group"], "here")


def test_a_rank_alone_knows_who_is_missing(world: Any) -> None:
    first = opened(world, 0)
    opened(world, 1, "something else")
    world.rank = 0
    assert first.missing(["group"]) == [1]
    with pytest.raises(SessionError, match=r"'w:grad': it is shared with other ranks, and rank 1 has nothing"):
        first.need(["group"], "'w:grad'")


def test_what_is_on_this_rank_alone_needs_nobody(world: Any) -> None:
    assert opened(world, 0).missing([]) == []


def test_a_rank_that_was_alone_before_is_together_later(world: Any) -> None:
    opened(world, 0).close()
    first, second = opened(world, 0), opened(world, 1)
    assert second.missing(["group"]) == []
    second.close()
    world.rank = 0
    assert first.missing(["group"]) == [1]


def test_one_that_closes_twice_is_counted_once(world: Any) -> None:
    first = opened(world, 0)
    first.leave()
    first.close()
    first.close()
    second = opened(world, 1)
    assert second.missing(["group"]) == [0]


def test_a_rank_that_does_it_twice_is_one_rank(world: Any) -> None:
    first, again = opened(world, 0), opened(world, 0)
    assert first.missing(["group"]) == [1]
    opened(world, 1)
    world.rank = 0
    again.close()
    assert first.missing(["group"]) == []
    first.close()
    world.rank = 1
    assert opened(world, 1).missing(["group"]) == [0]


def test_who_comes_alone_to_a_meeting_goes_on_alone(world: Any) -> None:
    first, second = opened(world, 0), opened(world, 1)
    assert not second.meet(["group"])
    assert not first.meet(["group"])


def test_in_one_process_there_is_nobody_to_wait_for() -> None:
    together = Together("watched")
    together.open()
    assert together.missing(["group"]) == []
    together.close()
