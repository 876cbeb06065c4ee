"""Running a model without leaving anything behind."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchhook as th
from tests import models
from torchhook._core import calling
from torchhook._core.calling import arguments, call, evaluating, in_mode, random_numbers, undisturbed
from torchhook._values.tree import Inputs


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (1, Inputs((1,), {})),
        ([1, 2], Inputs(([1, 2],), {})),
        ((1, 2), Inputs((1, 2), {})),
        ({"a": 1}, Inputs((), {"a": 1})),
        (UserDict(a=1), Inputs((), {"a": 1})),
        (Inputs((1,), {"a": 2}), Inputs((1,), {"a": 2})),
    ],
    ids=["one", "list", "tuple", "dict", "tokenised batch", "both"],
)
def test_inputs_become_arguments(inputs: Any, expected: Inputs) -> None:
    assert arguments(inputs) == expected


def test_a_model_that_writes_to_its_input_writes_to_a_copy() -> None:
    x = -torch.ones(2)
    assert call(nn.ReLU(inplace=True), arguments(x)).tolist() == [0, 0]
    assert x.tolist() == [-1, -1]


def test_every_generator_goes_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    restore = random_numbers()
    first = draw()
    restore()
    assert draw() == first


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.norm(x)


def test_buffers_that_moved_or_were_replaced_come_back_the_same_objects() -> None:
    model = Buffers()
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    with undisturbed(model) as restore:
        model(torch.randn(4, 3))
        assert model.steps.item() == 1
        restore()
        assert model.steps.item() == 0
        model(torch.randn(4, 3))
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)


@pytest.mark.parametrize("changes", [(), ("one",), ("two", "many", "halves", "flag")])
def test_only_buffers_whose_bits_have_changed_are_written_to(changes: tuple[str, ...]) -> None:
    nan = torch.tensor([1.0, float("nan")])
    held = {
        "one": torch.zeros(3),
        "two": nan.clone(),
        "turned": torch.randn(2, 3).t(),
        "many": torch.zeros(100_000),
        "halves": torch.zeros(4, dtype=torch.bfloat16),
        "count": torch.tensor(5),
        "flag": torch.tensor([True, False]),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "nothing": torch.zeros(0),
    }
    model = nn.Module()
    for name, buffer in held.items():
        model.register_buffer(name, buffer)
    before = {name: buffer.clone() for name, buffer in held.items()}
    versions = {name: buffer._version for name, buffer in held.items()}
    with undisturbed(model):
        for name in changes:
            held[name].fill_(1)
    for name, buffer in model.named_buffers():
        assert buffer is held[name]
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)
        # Once by the run, once to undo it; a graph may hold what has not changed.
        assert buffer._version == versions[name] + 2 * (name in changes)


class Questions(TorchDispatchMode):
    """Counts what a GPU would be waited for: single numbers that are read, and whole tensors that are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


def test_buffers_that_have_not_changed_are_asked_for_once_in_all() -> None:
    found = []
    for layers in (2, 50):
        model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers))).eval()
        with Questions() as questions, undisturbed(model):
            model(torch.randn(4, 3))
        found.append(questions.asked)
    assert found == [1, 1]


class Caches(nn.Module):
    """Changes what real models change beside their buffers: rotary tables, key-value caches, counters, losses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0), persistent=False)
        self.length = 2
        self.keys = torch.zeros(4)
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Any] = {"first": torch.zeros(1), "deep": [1]}
        self.inner = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("table", torch.arange(float(len(x))), persistent=False)
            self.register_buffer("more", torch.ones(1))
        self.keys[: len(x)] = x.detach()
        self.seen.append(x)
        self.by_name["first"].add_(1)
        self.by_name["deep"].append(2)
        self.by_name["second"] = x
        self.loss = x.sum()
        self.inner.eval()
        return x * self.table[: len(x)]


@pytest.mark.parametrize("fails", [False, True])
def test_caches_and_counters_in_plain_attributes_come_back_with_the_buffers_that_belong_to_them(fails: bool) -> None:
    model = Caches()
    before, table, keys, seen = set(vars(model)), model.table, model.keys, model.seen
    with contextlib.suppress(KeyError), undisturbed(model) as restore:
        for _ in range(2):
            assert model(torch.ones(3)).tolist() == [0, 1, 2]
            assert len(model.seen) == 1
            restore()
            assert model.length == 2
        model(torch.ones(3))
        if fails:
            raise KeyError
    assert set(vars(model)) == before
    assert model.length == 2
    assert [name for name, _ in model.named_buffers()] == ["table"]
    assert model.table is table
    assert model.keys is keys
    assert keys.tolist() == [0, 0, 0, 0]
    assert model.seen is seen
    assert seen == []
    assert list(model.by_name) == ["first", "deep"]
    assert (model.by_name["first"].item(), model.by_name["deep"]) == (0, [1])
    assert model.inner.training
    assert model(torch.ones(3)).tolist() == [0, 1, 2]


def test_a_tensor_that_was_given_other_memory_has_its_own_again() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.cache.data = torch.cat([self.cache, x])
            return self.cache

    model = Grows()
    with undisturbed(model):
        assert len(model(torch.ones(2))) == 3
    assert model.cache.tolist() == [0]


def test_gradients_come_back_the_same_objects_with_the_same_numbers() -> None:
    class Trains(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sum().backward()
            return super().forward(x)

    model = Trains(2, 1)
    given = model.weight.grad = torch.ones(1, 2)
    with undisturbed(model) as restore:
        for _ in range(2):
            model(torch.full((1, 2), 3.0))
            restore()
        model(torch.full((1, 2), 3.0))
    assert model.weight.grad is given
    assert given.tolist() == [[1, 1]]
    assert model.bias.grad is None


@pytest.mark.shows("Lazy modules: calls that leave the model undisturbed")
def test_a_lazy_module_stays_what_it_has_become() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with undisturbed(model):
        model(torch.ones(4, 2))
    assert (type(model[0]), model[0].in_features) == (nn.Linear, 2)
    assert (type(model[1]), model[1].num_features) == (nn.BatchNorm1d, 3)
    assert model(torch.ones(4, 2)).shape == (4, 3)


@pytest.mark.shows("TorchScript: buffers are left as they were")
def test_the_buffers_of_a_scripted_model_come_back() -> None:
    model = models.scripted(nn.Sequential(nn.BatchNorm1d(3)))
    with undisturbed(model):
        model(torch.randn(4, 3))
        assert model.state_dict()["0.num_batches_tracked"].item() == 1
    assert model.state_dict()["0.num_batches_tracked"].item() == 0
    assert model.state_dict()["0.running_mean"].tolist() == [0, 0, 0]


def test_an_error_passes_after_everything_is_back() -> None:
    model, state = Buffers(), torch.get_rng_state()

    def fail() -> None:
        with undisturbed(model):
            model(torch.randn(4, 3))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert model.norm.num_batches_tracked.item() == 0
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_mode_ends_with_the_block_however_it_ends() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU())
    model[1].training = False
    modes = []

    def fail() -> None:
        modes.extend(module.training for module in model.modules())
        raise KeyError

    with pytest.raises(KeyError), evaluating(model):
        fail()
    assert modes == [False, False, False]
    assert [module.training for module in model.modules()] == [True, True, False]


def test_modes_nest_and_each_block_goes_back_to_the_one_around_it() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU()).eval()
    model[1].training = True
    with in_mode(model, training=True):
        with evaluating(model):
            assert [module.training for module in model.modules()] == [False, False, False]
        assert [module.training for module in model.modules()] == [True, True, True]
    assert [module.training for module in model.modules()] == [False, False, True]
    assert calling._modes == {}


def test_of_blocks_that_overlap_in_threads_the_last_puts_the_modes_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU())
    entered, left = threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with evaluating(model):
            entered.set()
            left.wait(10)
            seen.extend(module.training for module in model.modules())

    thread = threading.Thread(target=second)
    with evaluating(model):
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    assert seen == [False, False, False]
    assert [module.training for module in model.modules()] == [True, True, True]
    assert calling._modes == {}


def test_a_mode_that_cannot_be_set_leaves_the_other_modules_as_they_were() -> None:
    class Stubborn(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training" and value is False:
                raise TypeError("I train")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.ReLU(), Stubborn(), nn.ReLU())
    with pytest.raises(TypeError, match="I train"), evaluating(model):
        pass
    assert [module.training for module in model.modules()] == [True, True, True, True]
    assert calling._modes == {}


def test_training_mode_ends_with_the_block_too() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU()).eval()
    model[1].training = True
    with in_mode(model, training=True):
        assert all(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [False, False, True]


@pytest.mark.parametrize("path", ["cat.jpg", Path("photos") / "cat.jpg", "/data/x.safetensors"])
@pytest.mark.parametrize("use", [lambda m, x: th.run(m, x), lambda m, x: th.layers(m, x), lambda m, x: th.ops(m, x)])
def test_a_path_where_a_tensor_is_expected_is_called_a_path(use: Any, path: Any) -> None:
    with pytest.raises(TypeError, match=r"called with the path '.*', and takes tensors: load the file") as caught:
        use(nn.Sequential(nn.Conv2d(3, 4, 3)), path)
    assert isinstance(caught.value.__cause__, (TypeError, AttributeError))


def test_a_model_that_takes_texts_or_files_has_its_own_errors() -> None:
    class Reads(nn.Module):
        def forward(self, x: Any) -> Any:
            raise FileNotFoundError(x) if "." in x else TypeError("mine")

    with pytest.raises(FileNotFoundError):
        th.run(Reads(), "cat.jpg")
    with pytest.raises(TypeError, match=r"^mine$"):
        th.run(Reads(), "a text")


class Remembers(nn.Module):
    """Writes to all that it holds: an ordered dict, in an order, and memory that is there several times."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = OrderedDict(one=1, two=2)
        once = torch.zeros(1)
        self.register_buffer("wide", once.expand(4))
        self.register_buffer("once", once)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.move_to_end("one")
        self.cache["more"] = 3
        self.once.add_(1)
        return x + self.wide[: x.shape[-1]]


def test_ordered_dicts_and_memory_that_is_there_several_times_are_put_back() -> None:
    model = Remembers()
    with undisturbed(model):
        model(torch.ones(2, 3))
        assert list(model.cache) == ["two", "one", "more"]
    assert list(model.cache.items()) == [("one", 1), ("two", 2)]
    model.cache.move_to_end("one")  # it is one still
    assert list(model.cache) == ["two", "one"]
    assert model.once.item() == 0
    assert model.wide.tolist() == [0.0] * 4
