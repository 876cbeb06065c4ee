"""How often a run would wait for a GPU, counted without one: a number that does not grow with the model."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchhook as th
from torchhook._extract import data_fingerprint, estimate, fingerprint, sources
from torchhook._features.api import Store
from torchhook._values.host_copies import HostCopies

X = torch.randn(12, 3)
ATEN = torch.ops.aten


class Waits(TorchDispatchMode):
    """Counts numbers that are read off a tensor, and tensors that are compared: on a GPU, the host waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ATEN.equal.default, ATEN._local_scalar_dense.default):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(layers)))


def waits(model: nn.Module, out: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    with monkeypatch.context() as patch, Waits() as waiting:
        # As if the parameters were on a GPU: else numpy reads them where they lie.
        patch.setattr(fingerprint, "_on_host", lambda flat: False, raising=False)
        patch.setattr(fingerprint, "_waited_for", lambda tensor: True, raising=False)
        patch.setattr(HostCopies, "wait", lambda copies: waiting.found.update(["copies"]))
        for name in ("cpu", "tolist"):
            plain = getattr(Tensor, name)

            def counted(tensor: Tensor, *args: Any, plain: Any = plain, name: str = name) -> Any:
                waiting.found[name] += 1
                return plain(tensor, *args)

            patch.setattr(Tensor, name, counted)
        # Rows are on the host already, and summed up by threads of their own.
        patch.setattr(data_fingerprint, "of_data", lambda *args: {})
        th.extract(model, X, "0", out, batch_size=3, progress=False)
    return waiting.found


def test_a_run_waits_for_the_device_no_more_often_if_the_model_is_larger(tmp_path, monkeypatch):
    small, large = (waits(deep(layers), tmp_path / str(layers), monkeypatch) for layers in (2, 60))
    assert large == small
    # Once for the sums of all weights, and once after each of the two blocks in which the model runs.
    assert large == {"copies": 1, "aten._local_scalar_dense.default": 2}


def test_data_in_memory_is_summed_up_beside_other_work_and_other_data_in_its_turn(monkeypatch):
    found: list[threading.Thread] = []
    plain = data_fingerprint.of_data

    def noted(*args: Any) -> dict[str, Any]:
        found.append(threading.current_thread())
        return plain(*args)

    monkeypatch.setattr(data_fingerprint, "of_data", noted)
    rows = list(X)
    for data, beside in ((X, True), (X.numpy(), True), (rows, False), (iter([X]), False)):
        source = sources.source(data, 3, None, False)
        with data_fingerprint.begun(source, None, None, None) as told:
            assert told() == plain(source, None, None, None)
        assert (found[-1] is not threading.current_thread()) is beside


def test_an_error_of_what_is_done_beside_is_raised_where_it_is_asked_for(tmp_path, monkeypatch):
    def fail(*args: Any) -> None:
        raise OSError("the data is gone")

    monkeypatch.setattr(data_fingerprint, "of_data", fail)
    with pytest.raises(OSError, match="the data is gone"):
        th.extract(deep(1), X, "0", tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


class Order:
    """What a run does, in its order: batches that are begun, waits for the first one, files, fingerprints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self.model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.model[0].register_forward_hook(lambda module, args, output: self.found.append("batch"))
        for owner, name, word in (
            (estimate._Timed, "seconds", "wait"),
            (fingerprint._Together, "begin", "sums begun"),
            (fingerprint.Ahead, "read", "sums read"),
            (Store, "agree", "manifest"),
            (Store, "clear", "clear"),
        ):
            monkeypatch.setattr(owner, name, self._noted(getattr(owner, name), word))

    def _noted(self, plain: Any, word: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.found.append(word)
            return plain(*args, **kwargs)

        return noted

    def of(self, out: Any, **options: Any) -> list[str]:
        self.found.clear()
        th.extract(self.model, X, "0", out, **{"batch_size": 3, "rows_per_shard": 3, "progress": False, **options})
        return [word for word in self.found if "sums" not in word]


BATCHES = ["batch"] * 3
"""Those after the first one, which is stored as it was measured."""


def test_the_next_batches_are_begun_before_the_first_has_ended(tmp_path, monkeypatch):
    order = Order(monkeypatch)
    assert order.of(tmp_path / "a") == ["batch", "manifest", *BATCHES]
    assert order.of(tmp_path / "b", progress=True) == ["batch", "manifest", "wait", *BATCHES]  # a line tells the time
    # No more than one batch fits: how long it takes decides nothing.
    monkeypatch.setattr(estimate, "SHARD_BYTES", 1)
    assert order.of(tmp_path / "c", rows_per_shard=None) == ["batch", "manifest", *BATCHES]


def test_the_first_batch_has_ended_before_its_time_cuts_rows_and_before_a_store_is_touched(tmp_path, monkeypatch):
    order, known = Order(monkeypatch), ["batch", "wait"]
    many = {"rows_per_shard": None, "batch_size": 1}
    found = order.of(tmp_path / "a", **many)
    assert found[:2] == known
    assert "manifest" in found[2:]
    # A row that may be skipped may be known by what the device says at the end.
    for out, options in (("new", {"on_error": "skip"}), ("a", {"resume": False})):
        found = order.of(tmp_path / out, **options)
        assert found[:2] == known, options
        assert "manifest" in found[2:], options
    assert order.of(tmp_path / "a")[:3] == [*known, "manifest"]
    assert order.of(tmp_path / "b", dry_run=True) == known


def test_what_shows_at_the_end_of_the_first_batch_leaves_a_store_as_it_was(tmp_path, monkeypatch):
    order, old, new = Order(monkeypatch), tmp_path / "old", tmp_path / "new"
    order.of(old)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}

    def fail(timed: Any) -> float:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(estimate._Timed, "seconds", fail)
    for options in ({"resume": False}, {}):
        with pytest.raises(RuntimeError, match="device-side assert"):
            order.of(old, **options)
        assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    with pytest.raises(RuntimeError, match="device-side assert"):
        order.of(new, progress=True)  # it was the first to say what the store holds, and takes that back
    assert not [path for path in new.rglob("*") if path.is_file()]


def test_the_sums_of_weights_are_begun_before_the_first_batch_and_read_before_the_second(tmp_path, monkeypatch):
    order = Order(monkeypatch)
    expected = fingerprint.of_tensors(order.model)
    monkeypatch.setattr(fingerprint, "_on_host", lambda flat: False)  # as if they were on a GPU
    monkeypatch.setattr(fingerprint, "_waited_for", lambda tensor: True)
    order.of(tmp_path)
    found = [word for at, word in enumerate(order.found) if word != order.found[at - 1] or not at]
    assert found[:4] == ["sums begun", "batch", "sums read", "sums begun"]
    assert found[4:] == ["manifest", "batch"]
    manifest = th.open_features(tmp_path).manifest
    assert (manifest.model, manifest.about["tensors"]) == expected
