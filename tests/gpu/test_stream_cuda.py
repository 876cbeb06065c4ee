"""Streams and statistics on a GPU: the tokens that the layers made, wherever the buffer is, and no waits on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass

SITES = ["up", "down"]


class Net(nn.Module):
    """Writes over its first value, and takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.relu = nn.Embedding(1000, 64), nn.Linear(64, 256), nn.ReLU(inplace=True)
        self.down = nn.Linear(256, 64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.down(self.relu(self.up(self.table(input_ids))))


def data(rows: int = 512) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(32) < torch.randint(1, 33, (rows, 1), generator=generator)).long()
    return {"input_ids": torch.randint(1, 1000, (rows, 32), generator=generator) * mask, "attention_mask": mask}


def truth(model: nn.Module, batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """What bare hooks see, without padding, in the order of the data."""
    seen: dict[str, list[Tensor]] = {site: [] for site in SITES}
    mask: list[Tensor] = []

    def hook(site: str) -> Any:
        return lambda m, a, out: seen[site].append(out.clone()[mask[-1]].cpu())

    handles = [model.get_submodule(site).register_forward_hook(hook(site)) for site in SITES]
    with torch.no_grad():
        for i in range(0, len(batch["input_ids"]), size):
            part = {name: value[i : i + size].cuda() for name, value in batch.items()}
            mask.append(part["attention_mask"].bool())
            model(**part)
    for handle in handles:
        handle.remove()
    return {site: torch.cat(values) for site, values in seen.items()}


def test_tokens_are_those_that_the_layers_made_on_the_device_and_on_the_host() -> None:
    model, text = Net().cuda(), data()
    wanted = truth(model, text, 32)
    for device in (None, "cuda", "cpu"):
        stream = th.stream(model, text, SITES, buffer=4096, batch=1000, shuffle=False, device=device)
        batches = list(stream)
        assert batches[0]["up"].device.type == (device or "cuda")
        for site in SITES:
            assert torch.equal(torch.cat([batch[site].cpu() for batch in batches]), wanted[site]), (device, site)


def test_shuffled_tokens_come_once_and_together_while_someone_else_uses_the_device() -> None:
    model, text = Net().cuda(), data()
    wanted = truth(model, text, 32)
    learner = nn.Linear(256, 64).cuda()
    for device in (None, "cpu"):
        found: dict[str, list[Tensor]] = {site: [] for site in SITES}
        for batch in th.stream(model, text, SITES, buffer=2048, batch=512, device=device, seed=3):
            learner(batch["up"].cuda()).sum().backward()
            for site in SITES:
                found[site].append(batch[site].cpu())
        up, down = (torch.cat(found[site]) for site in SITES)
        # Both columns in one row: the same token at the same place, each as often as there are such.
        rows = torch.cat([up, down], 1).unique(dim=0, return_counts=True)
        known = torch.cat([wanted["up"], wanted["down"]], 1).unique(dim=0, return_counts=True)
        assert all(torch.equal(one, other) for one, other in zip(rows, known, strict=True))


def test_statistics_are_those_of_the_tokens() -> None:
    model, text = Net().cuda(), data()
    wanted = truth(model, text, 32)
    found = th.statistics(model, text, SITES, covariance=True, quantiles=[0.5], top=3, resolution=1 << 15)
    for site in SITES:
        x, one = wanted[site].double(), found[site]
        assert one.count == len(x)
        assert torch.allclose(one.mean, x.mean(0), rtol=1e-10, atol=1e-12)
        assert torch.allclose(one.variance, x.var(0), rtol=1e-8)
        assert one.covariance is not None
        assert torch.allclose(one.covariance, torch.cov(x.T), rtol=1e-6, atol=1e-10)
        assert torch.equal(one.min, x.amin(0))
        assert torch.equal(one.max, x.amax(0))
        assert torch.allclose(one.quantile(0.5), x.quantile(0.5, dim=0), rtol=1e-12)
    for per in ("tensor", "token"):
        th.statistics(model, text, SITES, per=per, quantiles=[0.5], top=3)


def test_the_last_token_of_a_capture_is_no_padding() -> None:
    model, text = Net().cuda(), data(8)
    batch = {name: part.cuda() for name, part in text.items()}
    last = th.transforms.tokens("last")
    with torch.no_grad():
        _, whole = th.run(model, **batch, capture="down")
        _, rec = th.run(model, **batch, capture="down", transform=last, device="cpu")
    ends = text["attention_mask"].sum(1) - 1
    assert torch.equal(rec["down"], whole["down"].cpu()[torch.arange(8), ends])
