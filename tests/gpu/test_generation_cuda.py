"""Generation on a GPU: steps and positions with dynamic and static caches, which no step waits for."""

from __future__ import annotations

import torch

import torchhook as th
from tests.language_models import made

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


def test_a_joined_generation_equals_one_forward_pass() -> None:
    for cache in (None, "static"):
        _is_joined(cache)


def _is_joined(cache: str | None) -> None:
    model = made("llama", num_hidden_layers=2).cuda()
    ids = torch.randint(3, 60, (2, 5), device="cuda")
    options = {"cache_implementation": cache, "disable_compile": True} if cache else {}
    with th.capture(model, "model.layers.1") as rec:
        sequence = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    told = [(record.step, record.position) for record in rec.records("model.layers.1")]
    assert told == list(enumerate([0, 5, 6, 7, 8, 9]))
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad():
        model(sequence[:, :-1], use_cache=False)
    handle.remove()
    torch.testing.assert_close(rec.cat("model.layers.1", dim=1), seen[0], rtol=1e-4, atol=1e-4)


def test_a_position_that_lies_on_the_gpu_is_not_waited_for() -> None:
    class Told(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor | None = None) -> torch.Tensor:
            return self.inner(input_ids)

        def generate(self, ids: torch.Tensor, places: list[torch.Tensor]) -> None:
            for place in places:
                self(ids, cache_position=place)

    model, ids = Told(), torch.ones(1, 1, dtype=torch.long, device="cuda")
    places = [torch.tensor([at], device="cuda") for at in range(4)]
    with th.capture(model, "inner") as rec:
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.generate(ids, places)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [(record.step, record.position) for record in rec.records("inner")] == [(0, 0), (1, 1), (2, 2), (3, 3)]
