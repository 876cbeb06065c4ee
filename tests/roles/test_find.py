"""The search for names: what is open around it sees nothing of it, and what the model opens itself does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from tests.roles_models import build

IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(x)


def test_sessions_of_all_threads_see_nothing_of_the_search() -> None:
    model, edited = build("llama"), list[int]()
    manager = th.HookManager(model)
    manager.add("model.layers.0")
    with (
        torch.no_grad(),
        th.capture(model, "model.layers.0", "model.layers.1:input", threads="all") as rec,
        th.edit(model, {"model.layers.1": lambda value: edited.append(1)}, threads="all"),
        th.watch(model, threads="all") as watch,
    ):
        th.roles(model)
        assert len(rec) == 0
        model(IDS)
    assert [(record.site, record.call) for record in rec.records()] == [
        ("model.layers.0", 0),
        ("model.layers.1:input", 0),
    ]
    assert rec["model.layers.0"].shape[:2] == IDS.shape
    assert (rec.elsewhere, edited, [snapshot.step for snapshot in watch.history]) == ({}, [1], [0])
    assert [value.shape[:2] for value in manager.get("model.layers.0")] == [IDS.shape]
    manager.clear_hooks()


def test_a_session_of_all_threads_that_the_model_opens_itself_sees_its_calls() -> None:
    class Inward(nn.Module):
        """Reads its own block by a session of its own, and returns that."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Any:
            for i, block in enumerate(self.blocks):
                with th.capture(block, "ff", threads="all", keep="live") as rec:
                    x = block(x)
                assert rec["ff"].shape == x.shape, i
            return x

    names = th.roles(Inward(), torch.randn(2, 4, 8))
    assert names["@mlp_out.1"] == "blocks.1.ff"
