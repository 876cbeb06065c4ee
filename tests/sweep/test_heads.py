"""Sweeps over attention heads: the matrix is that of a loop by hand over slices of the projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.language_models import ENDS, made
from torchhook._recording.sweeps import Sweep
from torchhook._sweep.api import sweep as _sweep
from torchhook.errors import EditError


def sweep(*args: Any, **options: Any) -> Sweep:
    return _sweep(*args, progress=False, **options)


def gpt2() -> Any:
    return made("gpt2", n_layer=2, initializer_range=0.2, **ENDS)


def llama() -> Any:
    return made("llama", num_hidden_layers=2, initializer_range=0.2)


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(3))
    return ids[:1], ids[1:]


def margin(output: Any) -> Tensor:
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


def by_hand(
    model: nn.Module, module: nn.Module, heads: int, part: Callable[[Tensor, int], Tensor], inputs: bool
) -> Tensor:
    """Bare hooks: one forward pass for each head, whose part of the value is written over."""
    clean, corrupted = prompts()
    seen: list[Tensor] = []
    found = []
    with torch.no_grad():
        if inputs:
            handle: Any = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
        else:
            handle = module.register_forward_hook(lambda m, args, output: seen.append(output.clone()))
        model(clean)
        handle.remove()
        for head in range(heads):

            def put(value: Tensor, head: int = head) -> Tensor:
                value = value.clone()
                part(value, head).copy_(part(seen[0], head))
                return value

            if inputs:
                handle = module.register_forward_pre_hook(lambda m, args, put=put: (put(args[0]), *args[1:]))
            else:
                handle = module.register_forward_hook(lambda m, args, output, put=put: put(output))
            found.append(float(margin(model(corrupted))))
            handle.remove()
    return torch.tensor(found, dtype=torch.float64)


def side_by_side(value: Tensor, head: int) -> Tensor:
    return value[..., 8 * head : 8 * head + 8]


@pytest.mark.parametrize("batch", [None, 1])
def test_what_goes_into_the_output_projection(batch: int | None) -> None:
    model = gpt2()
    found = sweep(model, *prompts(), margin, sites="transformer.h.*.attn.c_proj:input", over="head", batch=batch)
    expected = [by_hand(model, block.attn.c_proj, 4, side_by_side, True) for block in model.transformer.h]
    assert found.values.shape == (2, 4)
    assert found.values.std() > 1e-3
    torch.testing.assert_close(found.values, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert (found.over, found.positions) == ("head", [0, 1, 2, 3])
    assert "by head" in str(found)
    assert list(found.data()) == ["site", "head", "value", "normalized"]


def test_a_head_of_a_fused_projection_is_its_query_key_and_value() -> None:
    model = gpt2()
    found = sweep(model, *prompts(), margin, sites="transformer.h.0.attn.c_attn", over="head")

    def part(value: Tensor, head: int) -> Tensor:
        return value.view(*value.shape[:2], 3, 4, 8)[:, :, :, head]

    expected = by_hand(model, model.transformer.h[0].attn.c_attn, 4, part, False)
    torch.testing.assert_close(found.values[0], expected, rtol=1e-5, atol=1e-5)


def test_grouped_queries_have_fewer_heads_of_keys() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    sites = [f"model.layers.0.self_attn.{name}_proj" for name in "qk"]
    found = sweep(model, *prompts(), margin, sites=sites, over="head")
    assert found.values.shape == (2, 4)
    assert found["model.layers.0.self_attn.k_proj"][2:].isnan().all()
    queries = by_hand(model, attention.q_proj, 4, side_by_side, False)
    keys = by_hand(model, attention.k_proj, 2, side_by_side, False)
    torch.testing.assert_close(found.values[0], queries, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values[1, :2], keys, rtol=1e-5, atol=1e-5)


def test_the_fused_call_and_some_heads_alone() -> None:
    model = gpt2()
    site = "transformer.h.1.attn/scaled_dot_product_attention"
    found = sweep(model, *prompts(), margin, sites=site, over="head", positions=[2, -1])
    whole = sweep(model, *prompts(), margin, sites="transformer.h.1.attn.c_proj:input", over="head")
    torch.testing.assert_close(found.values[0], whole.values[0, [2, 3]], rtol=1e-5, atol=1e-5)


def test_heads_are_estimated_too_and_may_be_named() -> None:
    """Exact where the model is linear."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    torch.manual_seed(0)
    model, clean, corrupted = Two(), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    options: dict[str, Any] = {"sites": "a", "over": "head", "heads": (-1, 3)}
    real = sweep(model, clean, corrupted, torch.sum, **options)
    found = sweep(model, clean, corrupted, torch.sum, estimate="gradient", **options)
    assert real.values.shape == (1, 3)
    torch.testing.assert_close(found.values, real.values, rtol=1e-4, atol=1e-5)
    patched = model.a(corrupted).detach()
    patched[..., 2:4] = model.a(clean).detach()[..., 2:4]
    assert real.values[0, 1].item() == pytest.approx(model.b(patched).sum().item(), rel=1e-5)


def test_where_there_are_no_heads_it_is_said() -> None:
    model = gpt2()

    def ask(site: str, **options: Any) -> Sweep:
        return sweep(model, *prompts(), margin, sites=site, over="head", **options)

    with pytest.raises(EditError, match=r"transformer\.h\.0\.mlp.*heads=\(dim, count\)"):
        ask("transformer.h.0.mlp")
    with pytest.raises(EditError, match=r"c_proj joins|'c_proj' joins the heads"):
        ask("transformer.h.0.attn.c_proj")
    with pytest.raises(EditError, match=r"heads=\(-1, 5\) was asked for"):
        ask("transformer.h.0.mlp", heads=(-1, 5))
    with pytest.raises(ValueError, match="over='position'"):
        sweep(model, *prompts(), margin, sites="transformer.h.*", heads=(1, 2))
    with pytest.raises(ValueError, match=r"positions \[7\] are out of range: head has 4"):
        ask("transformer.h.0.attn.c_proj:input", positions=[7])
