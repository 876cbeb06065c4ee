"""Steps of a generation: whose calls count, what tells them apart, and what is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import in_threads
from torchhook import edits
from torchhook._core import steps
from torchhook._core.index import Index
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.steps import Pass, current

VOCABULARY = 7


class Cache:
    """As those of transformers: it says how long it is, and can be cut."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1, 0, dtype=torch.long)

    def get_seq_length(self) -> int:
        return self.seen.shape[1]

    def crop(self, length: int) -> None:
        self.seen = self.seen[:, :length]


class Speaker(nn.Module):
    """Says the sum of all it has heard, with a cache or without one."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = nn.Identity()

    def forward(self, input_ids: Tensor, past_key_values: Cache | None = None) -> Tensor:
        before = torch.zeros(len(input_ids), 1, dtype=torch.long)
        if past_key_values is not None:
            before = past_key_values.seen.sum(1, keepdim=True)
            past_key_values.seen = torch.cat([past_key_values.seen.expand(len(input_ids), -1), input_ids], 1)
        return self.heard((before + input_ids.cumsum(1)) % VOCABULARY)

    def generate(self, ids: Tensor, tokens: int, cached: bool = True) -> Tensor:
        cache = Cache() if cached else None
        given = ids
        for _ in range(tokens):
            new = self(given, past_key_values=cache)[:, -1:]
            ids = torch.cat([ids, new], 1)
            given = new if cached else ids
        return ids


IDS = torch.tensor([[1, 2, 3]])


def told(rec: Any, site: str = "heard") -> list[tuple[int | None, int | None]]:
    return [(record.step, record.position) for record in rec.records(site)]


@pytest.mark.parametrize("cached", [True, False])
def test_whoever_has_a_generate_has_steps(cached: bool) -> None:
    model = Speaker()
    with th.capture(model, "heard") as rec:
        sequence = model.generate(IDS, 4, cached)
    assert told(rec) == [(0, 0), *((step, 2 + step if cached else 0) for step in (1, 2, 3))]
    assert torch.equal(rec.cat("heard", dim=1), sequence[:, :-1].cumsum(1) % VOCABULARY)


def test_an_edit_can_ask_for_the_step_and_the_position() -> None:
    model, seen = Speaker(), list[Any]()

    def ask(value: Tensor) -> None:
        now = current()
        seen.append(None if now is None else (now.step, now.position, now.tokens, now.beams))

    sites = ["heard", "heard:input", "(model)", "(model):input"]
    with th.edit(model, dict.fromkeys(sites, ask)):
        model.generate(IDS, 3)
        assert current() is None
        model(IDS)
    assert seen == [(0, 0, 3, False)] * 4 + [(1, 3, 1, False)] * 4 + [(2, 4, 1, False)] * 4 + [None] * 4
    assert current() is None


def test_sessions_inside_each_other_see_the_same_steps() -> None:
    model, seen = Speaker(), list[Any]()

    def ask(value: Tensor) -> None:
        now = current()
        seen.append(now and now.step)

    with th.edit(model, {"(model)": ask}), th.capture(model, "heard") as rec, th.edit(model, {"(model)": ask}):
        model.generate(IDS, 3)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert [step for step, _ in told(rec)] == [0, 1, 2]


def test_the_model_itself_has_the_step_of_its_call() -> None:
    model = Speaker()
    with th.capture(model, "(model)", "(model):input") as rec:
        model.generate(IDS, 3)
    assert told(rec, "(model)") == told(rec, "(model):input") == [(0, 0), (1, 3), (2, 4)]


def test_a_pass_that_raises_or_stops_is_over() -> None:
    model = Speaker()
    fail = [False, True, False]

    def maybe(value: Tensor) -> Tensor:
        if fail.pop(0):
            raise RuntimeError("no")
        return value

    with th.capture(model, "heard", edit={"heard": maybe}) as rec:
        with pytest.raises(RuntimeError, match="no"):
            model.generate(IDS, 3)
        assert current() is None
        model.heard(IDS)
    assert told(rec) == [(0, 0), (None, None)]
    session = th.capture(model, "heard", stop=True)
    with session as rec:
        for _ in range(3):
            session.run(IDS, past_key_values=Cache())
    assert told(rec) == [(0, 0)] * 3
    assert current() is None


def test_tokens_that_were_taken_back_are_not_joined() -> None:
    model, cache = Speaker(), Cache()
    with th.capture(model, "heard") as rec:
        model(IDS, past_key_values=cache)
        model(torch.tensor([[4, 5, 6]]), past_key_values=cache)
        cache.crop(4)
        model(torch.tensor([[1, 1]]), past_key_values=cache)
        cache.crop(5)
    wanted = torch.tensor([[1, 2, 3, 4, 1]]).cumsum(1) % VOCABULARY
    assert told(rec) == [(0, 0), (1, 3), (2, 4)]
    assert torch.equal(rec.cat("heard", dim=1), wanted)
    assert [value.shape[1] for value in rec.all("heard")] == [3, 3, 2]
    loaded = pickle.loads(pickle.dumps(rec))
    assert torch.equal(loaded.cat("heard", dim=1), wanted)


def test_a_cache_that_was_emptied_takes_nothing_back() -> None:
    model, cache = Speaker(), Cache()
    with th.capture(model, "heard") as rec:
        model(IDS, past_key_values=cache)
        cache.crop(0)
    assert rec.cat("heard", dim=1).shape[1] == 3


def test_the_cache_is_let_go_with_the_session() -> None:
    model, cache = Speaker(), Cache()
    gone = weakref.ref(cache)
    with th.capture(model, "heard") as rec:
        model(IDS, past_key_values=cache)
        del cache
    gc.collect()
    assert gone() is None
    assert told(rec) == [(0, 0)]


def test_the_cache_of_a_usual_generation_is_let_go_when_it_ends() -> None:
    class Noting(Speaker):
        def forward(self, input_ids: Tensor, past_key_values: Cache | None = None) -> Tensor:
            seen.append(weakref.ref(past_key_values))
            return super().forward(input_ids, past_key_values)

    model, seen = Noting(), list[Any]()
    with th.capture(model, "heard"):
        model.generate(IDS, 3)
        gc.collect()
        assert seen
        assert all(one() is None for one in seen)


def test_calls_of_other_threads_have_no_part_in_the_steps() -> None:
    model = Speaker()
    with th.capture(model, "heard") as rec:
        model(IDS, past_key_values=(cache := Cache()))
        thread = threading.Thread(target=model.generate, args=(IDS, 3))
        thread.start()
        thread.join()
        model(IDS[:, :1], past_key_values=cache)
    assert told(rec) == [(0, 0), (1, 3)]


def test_a_call_of_another_thread_that_ends_meanwhile_ends_none_of_this_one() -> None:
    class Meets(Speaker):
        meanwhile: Any = None

        def forward(self, input_ids: Tensor, past_key_values: Cache | None = None) -> Tensor:
            if self.meanwhile is not None and threading.current_thread() is threading.main_thread():
                in_threads(self.meanwhile)
            return super().forward(input_ids, past_key_values)

    model = Meets()
    alone = model(IDS)
    model.meanwhile = lambda: model(IDS)
    only_first = {"heard": edits.only(lambda value: value * 2, steps=0)}
    with th.capture(model, "heard") as rec, th.edit(model, only_first):
        model.generate(IDS, 3)
    assert told(rec) == [(0, 0), (1, 3), (2, 4)]
    assert torch.equal(rec["heard", 0], alone)
    with th.edit(model, only_first), th.capture(model, "heard") as edited:
        model.generate(IDS, 3)
    assert torch.equal(edited["heard", 0], alone * 2)


def test_all_threads_together_have_no_steps() -> None:
    model = Speaker()
    with th.capture(model, "heard", threads="all") as rec:
        model.generate(IDS, 3)
    assert told(rec) == [(None, None)] * 3


def test_a_model_that_cannot_generate_gets_no_hook_for_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert steps.generators(Index(model)) == []
    with th.capture(model, "0"):
        model(torch.ones(1, 3))
        hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    assert hooks == (1, 0)
    assert steps.generators(Index(Speaker())) != []


def test_who_only_looks_asks_for_no_steps() -> None:
    model = Speaker()
    session = Session(model)
    session.look(Target(Site("heard"), model.heard), lambda value, call: None)
    with session:
        model.generate(IDS, 2)
        assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (1, 0)


def test_a_block_that_takes_a_cache_is_no_model() -> None:
    class Block(nn.Module):
        def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> Tensor:
            return hidden_states

    class Base(nn.Module):
        def forward(self, input_ids: Tensor, *, past_key_values: Any = None) -> Tensor:
            return input_ids

    assert steps.generators(Index(Block())) == []
    base = Base()
    assert steps.generators(Index(base)) == [base]


def test_the_hooks_go_and_a_copy_of_the_model_has_none_that_count() -> None:
    model = Speaker()
    with th.capture(model, "heard") as rec:
        other = copy.deepcopy(model)
        other.generate(IDS, 2)
        pickle.loads(pickle.dumps(model)).generate(IDS, 2)
        model.generate(IDS, 2)
    assert told(rec) == [(0, 0), (1, 3)]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_steps_are_counted_anew_each_time_that_a_session_opens() -> None:
    model = Speaker()
    session = th.capture(model, "heard")
    for _ in range(2):
        with session as rec:
            model.generate(IDS, 2)
        assert told(rec) == [(0, 0), (1, 3)]


def test_plain_calls_leave_nothing_to_remember() -> None:
    model = Speaker()
    with th.capture(model, "heard", max_records=1) as rec:
        for _ in range(50):
            model(IDS)
        assert len(rec.passes) <= 1
        for _ in range(3000):
            model.generate(IDS, 1)
        assert len(rec.passes) < 2000
    assert told(rec) == [(0, 0)]


def test_an_edit_that_stays_remembers_no_generations() -> None:
    model = Speaker()
    session = th.edit(model, {"heard": lambda value: value})
    with session:
        for _ in range(2000):
            model.generate(IDS, 1)
        assert len(session.recording.passes) < 1100


def test_a_session_that_is_closed_in_the_middle_of_a_call_leaves_no_current_step() -> None:
    model, seen = Speaker(), list[Any]()
    session = th.edit(model, {"heard": lambda value: session.close()})
    session.open()
    handle = model.heard.register_forward_hook(lambda *call: seen.append(current()))
    model.generate(IDS, 2)
    handle.remove()
    assert seen == [None, None]


def test_legacy_caches_of_tuples_are_read_by_their_shape() -> None:
    cache = ((torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)),)
    assert steps.length(cache) == 5
    assert steps.length(None) is None
    assert steps.length(()) is None
    assert steps.length(object()) is None
    assert steps.length([torch.zeros(2, 8, 3)]) is None  # the states of a recurrent model

    class Broken:
        def get_seq_length(self) -> int:
            raise RuntimeError("not now")

    assert steps.length(Broken()) is None


class Forgetful(Cache):
    """Holds a window only, and says how long that is."""

    def get_seq_length(self) -> int:
        return min(self.seen.shape[1], 2)


class Silent(Cache):
    """Says always that it is empty."""

    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Forgetful, Silent])
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_cache_that_does_not_count_its_tokens_is_not_believed(kind: type[Cache], own_loop: bool) -> None:
    class Speaks(Speaker):
        def generate(self, ids: Tensor, tokens: int, cached: bool = True) -> Tensor:
            return loop(self, ids, tokens)

    def loop(model: nn.Module, ids: Tensor, tokens: int) -> Tensor:
        cache, given = kind(), ids
        for _ in range(tokens):
            given = model(given, past_key_values=cache)[:, -1:]
            ids = torch.cat([ids, given], 1)
        return ids

    model = Speaks()
    with th.capture(model, "heard") as rec:
        sequence = loop(model, IDS, 4) if own_loop else model.generate(IDS, 4)
    assert [step for step, _ in told(rec)] == [0, 1, 2, 3]
    assert [position for _, position in told(rec)][1:] == [3, 4, 5]
    assert torch.equal(rec.cat("heard", dim=1), sequence[:, :-1].cumsum(1) % VOCABULARY)


def test_a_model_that_holds_its_state_itself_is_given_one_token_after_the_other() -> None:
    class Recurrent(Speaker):
        heard_before = 0

        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
            value = self.heard((self.heard_before + input_ids.cumsum(1)) % VOCABULARY)
            self.heard_before = int(value[0, -1])
            return value

        def generate(self, ids: Tensor, tokens: int, cached: bool = True) -> Tensor:
            given = ids
            for _ in range(tokens):
                given = self(given)[:, -1:]
                ids = torch.cat([ids, given], 1)
            return ids

    model = Recurrent()
    with th.capture(model, "heard") as rec:
        sequence = model.generate(IDS, 4)
    assert told(rec) == [(0, 0), (1, 3), (2, 4), (3, 5)]
    assert torch.equal(rec.cat("heard", dim=1), sequence[:, :-1].cumsum(1) % VOCABULARY)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("prompts", [[1, 1, 1], [3, 1, 3], [1, 3, 2]])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_generations_one_after_the_other_are_told_apart(cached: bool, prompts: list[int], tokens: int) -> None:
    model = Speaker()
    with th.capture(model, "heard") as rec:
        sequences = [model.generate(IDS[:, :length], tokens, cached) for length in prompts]
    assert [step for step, _ in told(rec)] == [*range(tokens)] * 3
    for i, sequence in enumerate(sequences):
        joined = rec.cat(f"heard#{i * tokens}:{(i + 1) * tokens}", dim=1)
        assert torch.equal(joined, sequence[:, :-1].cumsum(1) % VOCABULARY)
    with pytest.raises(ValueError, match="several sequences"):
        rec.cat("heard", dim=1)


def test_what_a_generation_without_a_cache_had_is_let_go_with_the_session() -> None:
    class Own(Speaker):
        def generate(self, ids: Tensor, tokens: int, cached: bool = True) -> Tensor:
            held = Cache()
            gone.append(weakref.ref(held))
            return self(ids)

    model, gone = Own(), list[Any]()
    with th.capture(model, "heard"):
        model.generate(IDS, 1)
    gc.collect()
    assert gone[0]() is None


def test_a_position_that_is_given_is_taken() -> None:
    class Told(Speaker):
        def forward(self, input_ids: Tensor, cache_position: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    model = Told()
    with th.capture(model, "heard") as rec:
        for at in (0, 3, 4):
            model(IDS if at == 0 else IDS[:, :1], cache_position=torch.arange(at, at + 1))
    assert told(rec) == [(0, 0), (1, 3), (2, 4)]


def test_steps_survive_a_file(tmp_path: Path) -> None:
    model = Speaker()
    with th.capture(model, "heard", "(model)") as rec:
        model.heard(IDS)
        model.generate(IDS, 3)
        model.heard(IDS)
    rec.save(tmp_path / "r.safetensors")
    loaded = th.load(tmp_path / "r.safetensors")
    assert told(loaded) == told(rec) == [(None, None), (0, 0), (1, 3), (2, 4), (None, None)]
    assert told(loaded, "(model)") == told(rec, "(model)")
    assert torch.equal(loaded.cat("heard#1:4", dim=1), rec.cat("heard#1:4", dim=1))
    assert str(loaded.table()) == str(rec.table())
    assert "(model)      3    0-2        0-4" in str(rec)


def test_a_table_without_a_generation_says_nothing_of_steps() -> None:
    model = Speaker()
    with th.capture(model, "heard") as rec:
        model(IDS)
    assert "steps" not in str(rec)
    assert "steps" not in rec._repr_html_()


def test_gradients_have_no_step() -> None:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, inputs_embeds: Tensor, past_key_values: Any = None) -> Tensor:
            return self.fc(inputs_embeds)

        def generate(self, x: Tensor) -> Tensor:
            return self(self(x))

    model = Learner()
    with th.capture(model, "fc", "fc:grad") as rec:
        model.generate(torch.ones(1, 3, 2)).sum().backward()
    assert told(rec, "fc") == [(0, 0), (1, 0)]
    assert told(rec, "fc:grad") == [(None, None)] * 2


def test_a_pass_is_written_and_read() -> None:
    one = Pass(3, step=2, position=torch.tensor(7), tokens=4, sequence=1)
    assert one.plain() == [2, 7, 4, None, 1, False]
    assert Pass.of_plain(5, one.plain()).plain() == one.plain()
