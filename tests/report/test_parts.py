"""A report of a model whose weights and values are DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import torchhook as th


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")  # torch 2.6, of any mesh
def test_a_tensor_parallel_model_is_reported_and_compared(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        x = torch.randn(3, 4)
        page = Path(th.report(model, x, out=tmp_path / "report.html"))
        assert page.stat().st_size > 10_000
        _, one = th.run(model, x)
        _, two = th.run(model, x)
        assert th.diff(one, two).first is None
    finally:
        distributed.destroy_process_group()
