"""Devices by name, and paths where tensors are expected: one sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from torchhook._values.devices import named

X = torch.ones(2, 3)


@pytest.mark.parametrize("wrong", ["gpu", "GPU:0", "cuda0", "", 3.5])
def test_what_is_no_device_is_refused_by_the_keyword(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^device=.* is no device: use 'cpu', 'cuda', 'cuda:1', 'mps'"):
        th.capture(nn.Linear(3, 2), "(model)", device=wrong)


def test_a_gpu_by_its_plain_name_is_told_what_torch_calls_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run_on='gpu' is no device.*'cuda', one of Apple 'mps'"):
        th.extract(nn.Linear(3, 2), X, "(model)", tmp_path / "f", run_on="gpu", progress=False)
    assert named(torch.device("cpu"), "device") == named("cpu", "device") == torch.device("cpu")


@pytest.mark.parametrize("given", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_told_by_the_keyword(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"^device='{given}' cannot be used: torch .* finds no such device here"):
        th.capture(nn.Linear(3, 2), "(model)", device=given)
    with pytest.raises(ValueError, match=rf"^run_on='{given}' cannot be used: torch .* 'cpu' is there\.$"):
        th.extract(nn.Linear(3, 2), X, "(model)", tmp_path / "f", run_on=given, progress=False)
    assert not (tmp_path / "f").exists()


def test_a_gpu_beyond_the_last_is_told_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert named("cuda:1", "device") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"^device='cuda:2' cannot be used: there is 'cuda:0', 'cuda:1'\.$"):
        named("cuda:2", "device")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device='mps' cannot be used: "):
        named("mps", "device")
    assert named("meta", "device") == torch.device("meta")
