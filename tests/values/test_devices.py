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
