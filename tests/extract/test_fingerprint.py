"""What is the same gives the same text; what differs, another one."""

from __future__ import annotations

import functools
import hashlib
import operator

import numpy as np
import pytest
import torch
from torch import nn

from tests.extract import jobs
from torchhook import transforms
from torchhook._core.index import Index
from torchhook._extract import fingerprint
from torchhook._extract.api import extract
from torchhook._extract.fingerprint import contents, of_model
from torchhook._extract.function_fingerprint import of_function


def test_a_model_is_known_by_all_its_numbers_and_not_by_its_wrappers():
    known = of_model(jobs.Net())
    assert of_model(jobs.Net()) == known
    assert of_model(torch.compile(jobs.Net(), backend="eager")) == known
    assert of_model(jobs.Net().double()) != known
    assert of_model(jobs.Net(seed=1)) != known
    model = jobs.Net()
    with torch.no_grad():
        model.second.weight[3, 5].mul_(1.0001)
    assert of_model(model) != known


def test_buffers_and_odd_dtypes_count():
    model = nn.BatchNorm1d(3)
    known = of_model(model)
    model.running_mean[1] = 0.5
    assert of_model(model) != known
    holder = nn.Module()
    for name, dtype in {"a": torch.complex64, "b": torch.float8_e4m3fn, "c": torch.bool, "d": torch.bfloat16}.items():
        holder.register_buffer(name, torch.zeros(4).to(dtype))
    known = of_model(holder)
    holder.d[2] = 1
    assert of_model(holder) != known


@pytest.mark.parametrize("items", [0, 1, 3, 131_071, 131_072, 131_073, 400_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_the_contents_of_a_tensor_are_sums_that_python_gets_by_hand(items, dtype):
    tensor = torch.randint(-100, 100, (items,)).to(dtype)
    raw = tensor.numpy().tobytes()
    width = 8 if len(raw) % 8 == 0 and raw else tensor.element_size()
    signed = not (width == 1 and dtype == torch.uint8)
    numbers = np.frombuffer(raw, f"<{'i' if signed else 'u'}{width}").tolist()
    weights = [(i * 0x9E3779B97F4A7C15) & (2**64 - 1) for i in range(1, 131_073)]
    weights = [(w ^ (w >> 32)) | 1 for w in weights]
    blocks = [numbers[low : low + 131_072] for low in range(0, len(numbers), 131_072)] or [[]]
    sums = [sum(map(operator.mul, block, weights)) % 2**64 for block in blocks]
    expected = hashlib.sha256(np.array(sums, dtype="<u8").tobytes()).hexdigest()[:16]
    assert contents(tensor) == expected


def test_blocks_that_are_summed_together_give_the_same_as_one_by_one():
    flat = torch.randint(-(2**62), 2**62, (131_072 * 3 + 17,))
    of_device = flat.as_subclass(type("Elsewhere", (torch.Tensor,), {}))  # not by numpy
    assert np.array_equal(fingerprint._sums(flat), fingerprint._sums(of_device))


class Mixed(nn.Module):
    """Tensors of many lengths and kinds: small ones alike and not, some longer than a block, empty, odd, unreadable."""

    def __init__(self) -> None:
        super().__init__()
        rows = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(3, 5, bias=False), nn.Linear(700, 900)]
        self.rows = nn.ModuleList(rows)
        held = {
            "empty": torch.zeros(0),
            "odd": torch.randn(7).to(torch.float16),
            "odd_too": torch.randn(7).to(torch.bfloat16),
            "complex": torch.randn(6, dtype=torch.complex64),
            "flags": torch.rand(13) > 0.5,
            "shifted": torch.randn(9)[1:],
            "turned": torch.randn(4, 6).t(),
            "nowhere": torch.empty(5, device="meta"),
            "nowhere_long": torch.empty(400_000, device="meta"),
        }
        for name, value in held.items():
            self.register_buffer(name, value)


@pytest.mark.parametrize("together", [1 << 23, 20])
def test_many_tensors_on_a_device_have_the_fingerprint_that_each_has_alone(monkeypatch, together):
    model = Mixed()
    expected = fingerprint.of_tensors(model)
    assert expected[1]["nowhere"] == "unread"
    assert all(expected[1][name] == contents(tensor)[:8] for name, tensor in model.state_dict().items())
    monkeypatch.setattr(fingerprint, "_on_host", lambda flat: False)  # as if it were elsewhere
    monkeypatch.setattr(fingerprint, "_TOGETHER", together)
    assert fingerprint.of_tensors(model) == expected


def test_where_a_device_lacks_memory_for_many_tensors_each_is_summed_alone(monkeypatch):
    model = Mixed()
    expected = fingerprint.of_tensors(model)
    monkeypatch.setattr(fingerprint, "_on_host", lambda flat: False)

    def fail(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fingerprint.torch, "stack", fail)
    assert fingerprint.of_tensors(model) == expected


@pytest.fixture
def elsewhere(monkeypatch):
    """Every tensor as if it were on a GPU, and only what can be read there."""
    monkeypatch.setattr(fingerprint, "_on_host", lambda flat: False)
    monkeypatch.setattr(fingerprint, "_waited_for", lambda tensor: tensor.device.type != "meta")


def read_ahead(model):
    ahead = fingerprint.Ahead(Index(model))
    ahead.read()
    return names(model, ahead)


def names(model, ahead):
    return {
        name: ahead.contents[id(t)] for name, t in model.state_dict(keep_vars=True).items() if id(t) in ahead.contents
    }


def unreadable(tensor):
    raise RuntimeError("nothing is to be read here")


def test_what_is_read_ahead_is_what_each_tensor_holds(monkeypatch, elsewhere):
    model = Mixed()
    ahead = fingerprint.Ahead(Index(model))
    ahead.read()
    expected = {name: contents(tensor) for name, tensor in model.state_dict().items() if "nowhere" not in name}
    assert names(model, ahead) == expected
    monkeypatch.undo()
    known = fingerprint.of_tensors(model)
    # All the rest has no numbers.
    monkeypatch.setattr(fingerprint, "_integers", unreadable)
    assert fingerprint.of_tensors(model, ahead) == known


def test_of_the_host_nothing_is_read_ahead():
    assert read_ahead(Mixed()) == {}


def test_what_is_written_to_or_replaced_meanwhile_is_read_again(elsewhere):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7))
    ahead = fingerprint.Ahead(Index(model))
    with torch.no_grad():
        model[0].weight[0, 0] = 7.0
        model[1].running_mean.add_(1)
        model[2].weight.data = torch.ones(5, 4)
    model[3].bias = nn.Parameter(torch.ones(6))
    model[4] = nn.Linear(6, 7)
    ahead.read()
    again = {"0.weight", "1.running_mean", "2.weight", "3.bias", "4.weight", "4.bias"}
    assert set(model.state_dict()) - set(names(model, ahead)) == again
    assert fingerprint.of_tensors(model, ahead) == fingerprint.of_tensors(model)


def test_what_cannot_be_read_ahead_is_read_afterwards(elsewhere, monkeypatch):
    model = nn.Linear(3, 4)
    with torch.inference_mode():
        model.register_buffer("of_inference", torch.ones(3))  # nobody counts who writes to it
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert set(read_ahead(model)) == {"weight", "bias"}
    monkeypatch.setattr(fingerprint, "version_of", lambda tensor: -1)  # a torch without versions
    assert read_ahead(model) == {}


class Writing(nn.Module):
    """Writes to its own parameter as it runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        self.inner.bias.fill_(1.5)
        return self.inner(x)


def test_a_model_that_writes_to_its_weights_is_known_by_what_the_first_batch_leaves(elsewhere, tmp_path):
    model = Writing()
    features = extract(model, torch.ones(6, 3), "inner", tmp_path, batch_size=2, progress=False)
    assert features.manifest.model == of_model(model)
    assert extract(model, torch.ones(6, 3), "inner", tmp_path, batch_size=2, progress=False).manifest.rows == 6


def scale(value, by=2):
    return value * by


def maker(by):
    return lambda value: value * by


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (transforms.pool("mean"), transforms.pool("max")),
        (transforms.compose(transforms.pool(), transforms.cast(torch.half)), transforms.compose(transforms.pool())),
        (maker(2), maker(3)),
        (maker(torch.ones(2)), maker(torch.zeros(2))),
        (lambda v: v + 1, lambda v: v + 2),
        (functools.partial(scale, by=3), functools.partial(scale, by=4)),
        (operator.itemgetter(0), operator.itemgetter(1)),
        ({"a": transforms.pool()}, {"b": transforms.pool()}),
        (torch.relu, torch.tanh),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (None, transforms.pool()),
    ],
)
def test_functions_are_told_apart_and_known_again(one, other):
    assert of_function(one) != of_function(other)
    assert of_function(one) == of_function(one)
    assert " at 0x" not in of_function(one)


def test_the_same_closure_made_twice_is_the_same():
    assert of_function(maker(2)) == of_function(maker(2))
    assert of_function(transforms.compose(maker(2))) == of_function(transforms.compose(maker(2)))
