"""One model, several threads that extract from it: in evaluation mode, on one device, and put back by the last."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from torchhook._core import calling
from torchhook._extract import eval_mode
from torchhook._extract.api import extract
from torchhook._extract.eval_mode import evaluating_on, random_numbers_kept
from torchhook._features.api import open_features
from torchhook._statistics import statistics
from torchhook._stream.api import stream
from torchhook.errors import ExtractError

E = functools.partial(extract, progress=False)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def linear():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_two_threads_may_extract_from_one_model_that_trains(tmp_path):
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity()).train()
    model[1].eval()
    inside, first_done = threading.Barrier(2), threading.Event()
    modes, errors = [], []

    def short():
        with evaluating_on(model, None):
            inside.wait()
        first_done.set()

    def long():
        try:
            with evaluating_on(model, None):
                inside.wait()
                first_done.wait()
                modes.append(model.training or model[0].training)
                assert torch.equal(E(model, X, "1", tmp_path)["1"][:], X)
                modes.append(model.training or model[0].training)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for work in (short, long)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert modes == [False, False]
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert not eval_mode._models
    assert not calling._modes


@pytest.mark.shows("Threads: extract")
def test_threads_that_extract_at_the_same_time_get_their_own_rows(tmp_path):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4)).train()
    data = [torch.randn(400 * (i + 1), 3) for i in range(3)]
    threads = [
        threading.Thread(target=E, args=(model, x, "1", tmp_path / str(i)), kwargs={"batch_size": 8})
        for i, x in enumerate(data)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(module.training for module in model.modules())
    for i, x in enumerate(data):
        assert torch.allclose(open_features(tmp_path / str(i))["1"][:], model[1](x).detach(), atol=1e-6)


def test_a_model_in_use_stays_where_it_is_and_is_let_go(tmp_path):
    model = linear()
    with evaluating_on(model, "meta") as device:
        assert device.type == "meta"
        with evaluating_on(model, None) as second:
            assert second.type == "meta"
        with pytest.raises(ExtractError, match="another thread extracts from this model on meta"):
            with evaluating_on(model, "cpu"):
                pass
        assert model[0].weight.is_meta
        proxy = weakref.proxy(model)
        model.to = lambda device: proxy.to_empty(device=device)  # meta tensors cannot be copied back
    assert not model[0].weight.is_meta
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None
    broken = linear()
    broken.to = lambda device: 1 / (device.type == "cpu")
    with pytest.raises(ZeroDivisionError), evaluating_on(broken, "meta"):
        pass
    assert broken.training
    assert not eval_mode._models
    assert not calling._modes


class Movable(nn.BatchNorm1d):
    """Its buffers are other ones after each move, as with a GPU."""

    where = torch.device("cpu")

    def to(self, device):
        type(self).where = torch.device(device)  # not its own attribute, which would be put back
        for name, buffer in list(self._buffers.items()):
            self._buffers[name] = buffer.clone()
        return self


def test_moved_buffers_come_back_the_same_objects_and_not_before_the_last_is_done():
    model = Movable(3)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    first, second = evaluating_on(model, "meta"), evaluating_on(model, None)
    first.__enter__()
    moved = dict(model.named_buffers())
    assert not any(buffer is before[name][0] for name, buffer in moved.items())
    second.__enter__()
    model.running_mean.fill_(9)
    before["running_mean"][0].fill_(7)  # whoever holds the old one
    first.__exit__(None, None, None)
    assert all(buffer is moved[name] for name, buffer in model.named_buffers())
    assert model.where.type == "meta"
    second.__exit__(None, None, None)
    assert model.where.type == "cpu"
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_random_numbers_go_on_as_if_nothing_had_been():
    expected = torch.Generator()
    expected.set_state(torch.get_rng_state())
    with pytest.raises(ZeroDivisionError), random_numbers_kept():
        torch.rand(1 // int(torch.rand(5)[0] < 0))
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))


class Restless(nn.Module):
    """Changes all that a forward pass can: an attribute, a cache, a list, a buffer, random numbers, its gradients."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.seen, self.sizes = nn.Linear(3, 4), 0, [], {}
        self.plain = torch.zeros(2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.sizes.setdefault(x.shape[1], torch.arange(x.shape[1]))
        self.cache = x.sum()
        self.plain += 1
        self.count += 1
        with torch.enable_grad():
            nn.functional.linear(x + torch.rand(()), self.fc.weight, self.fc.bias).sum().backward()
        return self.fc(x)


def state_of(model):
    grad = model.fc.weight.grad
    return {
        "calls": model.calls,
        "seen": list(model.seen),
        "sizes": dict(model.sizes),
        "cache": hasattr(model, "cache"),
        "plain": (id(model.plain), model.plain.tolist()),
        "count": (id(model.count), model.count.tolist()),
        "gradients": (id(grad), None if grad is None else grad.tolist(), model.fc.bias.grad),
        "random numbers": torch.get_rng_state().tolist(),
        "modes": [module.training for module in model.modules()],
    }


def streamed(model, tmp_path):
    for _ in stream(model, X, "fc", buffer=16, batch=8):
        yield  # whenever a batch is handed out


def extracted(model, tmp_path):
    yield E(model, X, "fc", tmp_path, batch_size=8)


def measured(model, tmp_path):
    yield statistics(model, X, "fc", batch_size=8)


@pytest.mark.parametrize("way", [extracted, streamed, measured])
def test_a_model_is_left_as_it_was(tmp_path, way):
    model = Restless()
    model.fc.weight.grad = torch.full((4, 3), 5.0)
    before = state_of(model)
    for _ in way(model, tmp_path):
        assert state_of(model) == before
    assert state_of(model) == before


def test_a_model_is_left_as_it_was_where_it_fails(tmp_path):
    model = Restless()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), evaluating_on(model, None):
        torch.ones(1 // int(model(X).isnan().any()))
    torch.set_rng_state(torch.tensor(before["random numbers"], dtype=torch.uint8))  # they are another's business
    assert state_of(model) == before


def test_the_last_of_several_threads_gives_a_model_back():
    model = Restless()
    before = state_of(model) | {"random numbers": None}
    first, second = evaluating_on(model, None), evaluating_on(model, None)
    first.__enter__()
    second.__enter__()
    model(X)
    first.__exit__(None, None, None)
    assert model.calls == 1
    second.__exit__(None, None, None)
    assert state_of(model) | {"random numbers": None} == before


class CountsTwice(nn.Module):
    """Counts its calls in a buffer, and in an attribute of a module that has none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        self.calls += 1
        self.inner.seen = int(self.calls)
        return self.inner(x)


def test_without_attributes_buffers_modes_and_gradients_come_back_all_the_same():
    model = CountsTwice().train()
    model.inner.weight.grad = gradient = torch.ones(2, 2)
    calls = model.calls
    with evaluating_on(model, None, attributes=False), torch.no_grad():
        assert model.inner.weight.grad is None
        model(torch.ones(1, 2))
    assert model.calls is calls
    assert model.calls.item() == 0
    assert model.inner.weight.grad is gradient
    assert model.training
    assert model.inner.seen == 1  # as it has become: that is the price of less to put back
