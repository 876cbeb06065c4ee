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
from torchhook._extract import data_fingerprint, fingerprint, sources

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
    assert large == {"cpu": 1, "aten._local_scalar_dense.default": 2}


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
