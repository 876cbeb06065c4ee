"""Masks stay on the host, where they are checked; what they choose is on the GPU."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

from torchhook import transforms
from torchhook._extract.api import extract

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16, padding_idx=0)

    def forward(self, input_ids, attention_mask=None):
        return self.embed(input_ids)


def test_padding_stays_out_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (40, 12), generator=generator)
    lengths = torch.randint(2, 12, (40,), generator=generator)
    mask = torch.arange(12) < lengths[:, None]
    model = Words()
    by_hand = {
        transforms.pool("mean"): lambda row: row.mean(0),
        transforms.pool("max"): lambda row: row.amax(0),
        transforms.tokens("last"): lambda row: row[-1],
        transforms.tokens([0, -1]): lambda row: row[[0, -1]],
    }
    for place in ("cpu", "cuda"):
        for flip in (False, True):
            rows = (ids * mask, mask.long())
            data = torch.utils.data.TensorDataset(
                *(part.flip(1).to(place) if flip else part.to(place) for part in rows)
            )
            for transform, reduce in by_hand.items():
                with tempfile.TemporaryDirectory() as out:
                    found = extract(model, data, "embed", out, transform=transform, run_on="cuda", progress=False)
                    wanted = [
                        reduce(model.embed(r[m].flip(0) if flip else r[m])) for r, m in zip(ids, mask, strict=True)
                    ]
                    torch.testing.assert_close(found["embed"][:], torch.stack(wanted).detach(), atol=1e-6, rtol=0)
            with tempfile.TemporaryDirectory() as out:
                whole = extract(model, data, "embed", out, lengths=lambda b: b[1], run_on="cuda", progress=False)
                assert [len(row) for row in whole["embed"]] == lengths.tolist()
