"""The model's code and plain values are part of what a store knows; the first stored batch proves the rest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn

from tests.language_models import checkpointed
from torchhook import transforms
from torchhook._core.index import Index
from torchhook._extract.api import extract
from torchhook._extract.function_fingerprint import bytecode, of_function
from torchhook._extract.model_code import facts
from torchhook._features import differences
from torchhook.errors import ExtractError, StoreMismatchError

E = functools.partial(extract, progress=False, rows_per_shard=10, batch_size=5)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
FACTOR = 2.0


def code(model):
    return facts(Index(model), {})


def differ(one, other):
    a, b = code(one), code(other)
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


# -- what is covered --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, scale=2.0, config=None):
        super().__init__()
        self.scale, self.config = scale, config
        self.line = nn.Linear(3, 3)
        nn.init.eye_(self.line.weight)
        nn.init.zeros_(self.line.bias)

    def forward(self, x):
        return self.helped(self.line(x))

    def helped(self, x):
        return x * self.scale

    def unrelated(self):
        return "not a part of forward"


def test_a_changed_plain_attribute_is_refused_by_name(tmp_path):
    E(Scaled(), X, "(model)", tmp_path)
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    with pytest.raises(StoreMismatchError, match=r"code of Scaled.scale: the store has 2.0, this run 3.0"):
        E(Scaled(3.0), X, "(model)", tmp_path)
    assert torch.allclose(E(Scaled(), X, "(model)", tmp_path)["(model)"][:], X * 2)


@dataclasses.dataclass
class Config:
    width: int = 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        ((1, 2), (1, 3)),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}),
        (Config(3), Config(4)),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (torch.float16, torch.float32),
        (torch.zeros(3), torch.ones(3)),
        (torch.relu, torch.tanh),
        ([nn.Linear(2, 2)], [nn.Linear(2, 2)]),  # not registered, and yet used
        (lambda x: x + 1, lambda x: x + 2),
        ({1, 2}, {1, 3}),
        (functools.lru_cache(lambda x: x + 1), functools.lru_cache(lambda x: x + 2)),
    ],
)
def test_nested_settings_are_told_apart(one, other):
    assert differ(Scaled(config=one), Scaled(config=other)) == {"Scaled.config"}
    assert differ(Scaled(config=one), Scaled(config=one)) == set()


def test_settings_of_torchs_own_modules_that_are_no_numbers_count():
    assert differ(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4)) >= {"MultiheadAttention.num_heads"}
    assert differ(nn.Linear(2, 2), nn.Linear(2, 2)) == set()


def made(body, name="Net"):
    """A class as another version of a file would define it."""
    space = {"nn": nn, "torch": torch, "__name__": "somewhere"}
    exec(compile(body, "<a user's file>", "exec"), space)
    return space[name]()


BODY = """
import functools
SCALE = 2
def half(x):
    return x / SCALE
@functools.lru_cache
def kept(x):
    return x + 10
class Helper:
    def __init__(self, by):
        self.by = by * 20
    def run(self, x):
        return self.further(x)
    def further(self, x):
        return x + 30
    def elsewhere(self):
        return 40
class Operation(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x + 50
class Net(nn.Module):
    power = 1
    unused = 1
    def forward(self, x):
        '''What it does.'''
        if len(x) > 1000:
            return self.others(x)
        return self.inner(x) ** self.power
    offset = torch.zeros(1)
    several = {1, 2}
    def inner(self, x):
        return half(x)  # a comment
    def others(self, x):
        x = Operation.apply(Helper(1).run(kept(x))) + self.offset * len(self.several)
        return self.cached(1) + sum(x * {"a": 1, "b": 2}[c] for c in ["a"] if c != "b")
    @functools.lru_cache
    def cached(self, by):
        return by * 60
    def unrelated(self):
        return 1
"""


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("self.inner(x)", "self.inner(x) + 1", {"Net"}),
        ("power = 1", "power = 3", {"Net, which uses power"}),
        ("unused = 1", "unused = 3", set()),
        ("return half(x)", "return half(-x)", {"Net"}),
        ("x / SCALE", "x * SCALE", {"Net"}),
        ("SCALE = 2", "SCALE = 3", {"Net, which uses SCALE"}),
        ("What it does.", "What it really does.", set()),
        ("# a comment", "# another", set()),
        ("return 1", "return 2", set()),
        ("SCALE = 2", "\n\n\nSCALE = 2", set()),
        ('if c != "b"', 'if c != "c"', {"Net"}),
        ("x + 10", "x + 11", {"Net"}),
        ("by * 20", "by * 21", {"Net"}),
        ("x + 30", "x + 31", {"Net"}),
        ("return 40", "return 41", set()),
        ("x + 50", "x + 51", {"Net"}),
        ("by * 60", "by * 61", {"Net"}),
        ("torch.zeros(1)", "torch.ones(1)", {"Net, which uses offset"}),
        ("several = {1, 2}", "several = {1, 3}", {"Net, which uses several"}),
    ],
)
def test_code_that_forward_reaches_is_compared_and_nothing_else(before, after, named):
    assert before in BODY
    assert differ(made(BODY), made(BODY.replace(before, after))) == named


def test_a_changed_forward_is_refused(tmp_path):
    E(made(BODY), X, "(model)", tmp_path)
    other = made(BODY.replace("x / SCALE", "x / SCALE + 0.0001 * x"))
    with pytest.raises(StoreMismatchError, match="code of Net: "):
        E(other, X, "(model)", tmp_path)
    with pytest.raises(StoreMismatchError, match="code of Net, which uses SCALE: the store has 2, this run 3"):
        E(made(BODY.replace("SCALE = 2", "SCALE = 3")), X, "(model)", tmp_path)
    assert torch.equal(E(made(BODY), X, "(model)", tmp_path)["(model)"][:], X / 2)


def times(value):
    return value * FACTOR


def test_a_transform_that_reads_a_changed_global_is_refused(tmp_path, monkeypatch):
    E(Scaled(), X, "line", tmp_path, transform=times)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    with pytest.raises(StoreMismatchError, match=r"transform: .*FACTOR=2.0.*FACTOR=3.0"):
        E(Scaled(), X, "line", tmp_path, transform=times)
    with pytest.raises(StoreMismatchError, match=r"input_fn: .*"):
        E(Scaled(), X, "line", tmp_path, input_fn=times)


class Holder:
    value = 1


def test_functions_are_known_by_what_they_reach():
    def reads_attribute():
        return Holder.value

    def calls(x):
        return times(x)

    before = of_function(reads_attribute), of_function(calls)
    Holder.value = 2
    try:
        assert of_function(reads_attribute) != before[0]
        assert of_function(calls) == before[1]
    finally:
        Holder.value = 1
    two = [(lambda x, by=by: x * by) for by in (2, 3)]
    assert of_function(two[0]) != of_function(two[1])

    def both(x, one=two[0], other=two[1]):
        return one(x) + other(x)

    def twice(x, one=two[0], other=two[0]):
        return one(x) + other(x)

    assert of_function(both).split("[")[1] != of_function(twice).split("[")[1]


class Called:
    """A callable that shows nothing of itself."""

    def __init__(self, by):
        self.by = by

    def __call__(self, value):
        return value * self.by


def test_objects_that_are_called_are_known_by_their_values_and_code():
    assert of_function(Called(2)) != of_function(Called(3))
    assert of_function(Called(2)) == of_function(Called(2))
    assert of_function(transforms.compose(Called(2))) == of_function(transforms.compose(Called(2)))


def test_the_same_code_is_the_same_in_another_process():
    program = (
        "from tests.extract.test_model_code import BODY, Scaled, code, made, times\n"
        "from torchhook._extract.function_fingerprint import of_function\n"
        "print(code(made(BODY)), code(Scaled(config={'a', 'b', 'c'})), of_function(times))"
    )
    told = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert told[0].stdout == told[1].stdout != "", told[0].stderr


def test_code_that_is_run_as_a_script_is_the_same_as_when_it_is_imported():
    def run(module):
        space = {"nn": nn, "torch": torch, "__name__": module}
        exec(compile(BODY + "\nclass Part: pass\ndef f(x, c=Part(), k=Part): return x", "<file>", "exec"), space)
        model = space["Net"]()
        model.part, model.kind = space["Part"](), space["Part"]
        return code(model), of_function(space["f"])

    assert run("__main__") == run("a.module")


def test_bytecode_does_not_depend_on_where_code_stands():
    one, other = (compile("\n" * n + "def f(x):\n  return x + 1", "a" * n, "exec").co_consts[0] for n in (1, 2))
    assert bytecode(one) == bytecode(other)


# -- what a run changes itself ------------------------------------------------------------------------------


class Counting(Scaled):
    def __init__(self, scale=2.0):
        super().__init__(scale)
        self.calls, self.cache = 0, {}

    def forward(self, x):
        self.calls += 1
        self.cache.setdefault(x.shape[1], torch.arange(x.shape[1]))
        return super().forward(x)


def test_counters_and_caches_do_not_stop_a_run_from_being_resumed(tmp_path):
    model = Counting()
    seen = []

    def watching(value):
        seen.append(len(value))
        return value

    E(model, X, "(model)", tmp_path, transform=watching)
    for again in (model, Counting()):
        (tmp_path / "shards" / "s000000002.safetensors").unlink()
        assert len(E(again, X, "(model)", tmp_path, transform=watching)) == 40
    with pytest.raises(StoreMismatchError, match=r"Counting.scale"):
        E(Counting(3.0), X, "(model)", tmp_path, transform=watching)


def test_a_device_is_no_setting():
    assert differ(Scaled(config=torch.device("cuda:1")), Scaled(config=torch.device("cpu"))) == set()
    assert differ(Scaled(config="cuda:1"), Scaled(config="cuda:0")) == set()


class Terse(Called):
    def __repr__(self):
        return "Terse()"


class Head(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


def test_what_is_called_is_known_by_more_than_it_says_of_itself():
    assert of_function(Terse(1)) != of_function(Terse(2))
    assert of_function(Terse(1)) == of_function(Terse(1))
    lambdas = pytest.importorskip("torchvision").transforms
    one, other = (lambdas.Compose([lambdas.Lambda(lambda x, by=by: x * by)]) for by in (1, 2))
    assert of_function(one) != of_function(other)
    for pair in ((Head(1), Head(2)), ({"a": Head(1)}, {"a": Head(2)})):
        one, other = (facts(Index(Scaled()), {"transform": head}) for head in pair)
        assert {name for name in one if one[name] != other[name]} == {"transform, Head.by"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # made of a set, say, whose order is another one in each process
        (None, threading.Lock()),
        (logging.getLogger("one"), None),
    ],
)
def test_order_and_what_is_only_held_on_to_are_no_settings(tmp_path, one, other):
    E(Scaled(config=one), X, "(model)", tmp_path)
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    assert len(E(Scaled(config=other), X, "(model)", tmp_path)) == 40


def test_a_model_of_transformers_is_the_same_when_it_is_loaded(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    made = transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))
    before = code(made)
    made.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path)
    after = code(checkpointed(loaded))
    assert list(differences.code(before, after, True)) == []
    other = transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes, hidden_act="relu"))
    assert list(differences.code(before, code(other), True))


# -- the proof: the first stored batch ------------------------------------------------------------------------


class Hidden(nn.Module):
    """Computes with something that nobody can see: a stand-in for a library's kernel or a compiled extension."""

    def __init__(self, by):
        super().__init__()
        self.line = nn.Linear(3, 3)
        nn.init.eye_(self.line.weight)
        self.box = [by].__iter__  # a bound method of a list: of no plain class

    def forward(self, x):
        (by,) = self.box()
        return self.line(x) * by


def test_a_model_whose_outputs_changed_is_found_by_the_first_stored_batch(tmp_path):
    assert code(Hidden(2.0)) == code(Hidden(3.0))  # else this test would show nothing
    torch.manual_seed(0)
    model = Hidden(2.0)
    E(model, X, ["line", "(model)"], tmp_path)
    model.box = [2.01].__iter__
    with pytest.raises(
        StoreMismatchError, match=r"(?s)rows 0 to 4 .*'\(model\)'.*differ by 5\.0e-03 \(relative"
    ) as caught:
        E(model, X, ["line", "(model)"], tmp_path)
    assert "'line'" not in str(caught.value)
    for change in ({"batch_size": 7}, {"batch_size": 40}):
        model.box = [2.0].__iter__
        assert len(E(model, X, ["line", "(model)"], tmp_path, **change)) == 40


def test_where_shard_0_is_missing_the_first_one_that_is_there_is_compared(tmp_path):
    torch.manual_seed(0)
    model = Hidden(2.0)
    E(model, X, "(model)", tmp_path)
    for gone in (0, 1):
        (tmp_path / "shards" / f"s00000000{gone}.safetensors").unlink()
    model.box = [-2.0].__iter__
    with pytest.raises(StoreMismatchError, match=r"rows 20 to 24"):
        E(model, X, "(model)", tmp_path)


@pytest.mark.parametrize(
    "kind", ["stream", "half", "bfloat16", "float8", "ragged", "integers", "ids", "skipped", "structured", "empty"]
)
def test_the_first_batch_of_the_same_model_is_always_accepted(tmp_path, kind):
    torch.manual_seed(0)
    model, options, data = Hidden(2.0), {}, (lambda: X)
    site = "(model)"
    if kind == "stream":
        options, data = {"batch_size": None}, lambda: iter(X.split(5))
    elif kind in ("half", "bfloat16", "float8"):
        options["dtype"] = {
            "half": torch.float16, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn
        }[kind]  # fmt: skip
    elif kind == "ragged":
        model, site = nn.Sequential(nn.Linear(3, 3)), "0"
        tokens = torch.randn(40, 6, 3)
        options["lengths"], data = (lambda b: [2 + len(b) % 3] * len(b)), (lambda: tokens)
    elif kind == "integers":
        options["transform"] = lambda v: v.argmax(1)
    elif kind == "ids":
        options |= {"ids": [f"é{i}" for i in range(40)], "labels": list(range(40))}
    elif kind == "skipped":
        bad = X.clone()
        bad[[0, 3]] = float("nan")
        options["on_error"], data = "skip", (lambda: bad)
    elif kind == "structured":
        options["transform"] = transforms.statistics()
    elif kind == "empty":
        options["transform"] = lambda v: v[:, :0]

    def call():
        return E(model, data(), site, tmp_path, **options)

    call()
    (tmp_path / "shards" / "s000000003.safetensors").unlink()
    assert len(call()) == 40
    assert len(call()) == 40


class Restless(Scaled):
    def forward(self, x):
        return nn.functional.dropout(self.line(x), 0.5, training=True)


def test_a_model_that_draws_random_numbers_can_be_gone_on_with(tmp_path):
    E(Restless(), X, ["line", "(model)"], tmp_path)
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    assert len(E(Restless(), X, ["line", "(model)"], tmp_path)) == 40
    other = Restless()
    other.line.forward = lambda x: x + 1  # in its instance: a function like any other value
    with pytest.raises(StoreMismatchError, match=r"code of Linear.forward|'line'"):
        E(other, X, ["line", "(model)"], tmp_path)


def test_a_stream_of_other_values_is_still_refused(tmp_path):
    E(Scaled(), iter(X.split(5)), "line", tmp_path, batch_size=None)
    with pytest.raises(ExtractError, match=r"not what shard|differ"):
        E(Scaled(), iter((X + 1).split(5)), "line", tmp_path, batch_size=None)
