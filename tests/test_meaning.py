"""One meaning of a gradient: on real models, ``site:grad`` is what a bump by an edit at the same address does.

The oracle is a central difference along a random direction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchhook as th
from tests.models import tensors_in
from tests.zoo import FUSED, MANY_LAYERS, WITHOUT_GRADIENT, ZOO, Case
from torchhook import edits

STEP = 1e-6
SINGLE = {"transformers_gemma2", "transformers_mamba", "transformers_t5"}  # they compute in it inside
NOT_DOUBLE = {"torchvision_raft_small", "transformers_mixtral"}  # torch and torchvision lack kernels for it
SITES = 10  # of each model, drawn by its name


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: doubled(part) for name, part in value.items()}
    return type(value)(map(doubled, value)) if type(value) in (list, tuple) else value


def score(case: Case) -> Tensor:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    found = {id(t): t for t in tensors_in(case.model(*case.args, **case.kwargs)) if t.requires_grad}  # not caches
    parts = [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in found.values()]
    return torch.stack(parts).sum()


def gradients(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors at the first level of a gradient, each with its address there."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, (tuple, list)):
        yield from ((str(i), part) for i, part in enumerate(value) if isinstance(part, Tensor))
    elif isinstance(value, dict):
        yield from ((name, part) for name, part in value.items() if isinstance(part, Tensor))


@pytest.mark.shows("Models: gradients mean the same as edits")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
@pytest.mark.parametrize("name", sorted(set(ZOO) - MANY_LAYERS - WITHOUT_GRADIENT - FUSED - NOT_DOUBLE))
def test_a_gradient_is_what_a_bump_by_an_edit_does(name: str) -> None:
    case = ZOO[name]()
    case = case._replace(model=case.model.double(), args=doubled(case.args), kwargs=doubled(case.kwargs))
    with th.capture(case.model, "**", port="grad") as rec:
        score(case).backward()
    plain = float(score(case).detach())
    # Hooks of the model's own run first, and some keep what they see: that is no part of what an edit changes.
    kept = {name for name, module in case.model.named_modules() if module._forward_hooks}
    once = [r for r in rec.records() if len(rec.all(r.site)) == 1 and r.site.path not in kept]
    compared = 0
    for record in random.Random(name).sample(once, min(SITES, len(once))):
        for address, gradient in gradients(record.value):
            direction = torch.randn(gradient.shape, dtype=gradient.dtype, generator=torch.Generator().manual_seed(2))
            scores = []
            for step in (STEP, -STEP):
                bump = edits.add(step * direction)
                edit = {record.site.but(port="output", call=record.call): edits.at(address, bump) if address else bump}
                with th.edit(case.model, edit):
                    scores.append(score(case).detach())
            right, left = (float(scores[0]) - plain) / STEP, (plain - float(scores[1])) / STEP
            expected, found = (right + left) / 2, float((gradient * direction).sum())
            room = 1e-4 * float((gradient * direction).abs().sum()) + 1e-5
            # A kink (zeros that meet in a maximum), or a part of the model that computes in single precision.
            if abs(right - left) > room:
                continue
            assert abs(found - expected) <= room, (record.site, address, found, expected)
            compared += 1
    assert compared or name in SINGLE
