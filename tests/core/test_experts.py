"""Mixtures of experts whose experts are one module: the rows of each expert, by the operations inside of it.

The oracle computes each expert by hand from its slice of the weights and the router's choice.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.language_models import HAS_GROUPED_PRODUCT, NO_GROUPED_PRODUCT, made
from torchhook import edits
from torchhook._capture import run
from torchhook._layers.api import ops
from torchhook._values.tree import Inputs

EXPERTS = "model.layers.1.mlp.experts"
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 8, 30]])


def mixtral(implementation: str) -> Any:
    model = made("mixtral", num_hidden_layers=2, experts_implementation=implementation)
    with torch.no_grad():  # far from zero, which anything would be near to
        for parameter in model.parameters():
            parameter *= 8 if parameter.dim() == 3 else 1
    return model


def by_hand(model: Any, by_choice: bool = False) -> dict[int, Tensor]:
    """What each expert makes of the tokens that the router gave it, before the router's weights.

    In the order of the tokens, or first those that chose it first.
    """
    experts, seen = model.get_submodule(EXPERTS), []
    handle = experts.register_forward_pre_hook(lambda module, args: seen.append([a.clone() for a in args]))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    hidden, chosen, _ = seen[0]
    found = {}
    for expert in range(experts.num_experts):
        places = [(int(t), int(choice)) for t, choice in (chosen == expert).nonzero()]
        rows = [token for token, _ in sorted(places, key=lambda place: place[1] if by_choice else 0)]
        if rows:
            gate, up = (hidden[rows] @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
            found[expert] = ((F.silu(gate) * up) @ experts.down_proj[expert].T).detach()
    return found


def the_product(model: Any) -> str:
    """What the grouped product is called in this version of torch."""
    text = str(ops(model, TOKENS))
    return next(name for name in ("_grouped_mm", "grouped_mm") if f"{EXPERTS}/{name}" in text)


@pytest.mark.shows("Models: experts of a mixture that are one module")
def test_experts_in_a_loop_have_a_call_for_each_that_was_chosen() -> None:
    model = mixtral("eager")
    expected = by_hand(model, by_choice=True)
    with torch.no_grad():
        _, rec = run(model, TOKENS, capture=f"{EXPERTS}/linear")
    # Two products for each expert that got a token; the second is what it returns.
    outputs = rec.all(f"{EXPERTS}/linear")[1::2]
    assert len(outputs) == len(expected) < 5
    for found, rows in zip(outputs, expected.values(), strict=True):
        assert torch.allclose(found, rows, rtol=1e-4, atol=1e-6)


@pytest.mark.shows("Models: experts of a mixture that are one module")
@pytest.mark.skipif(not HAS_GROUPED_PRODUCT, reason=NO_GROUPED_PRODUCT)
def test_grouped_experts_lie_beside_each_other_in_one_product() -> None:
    model = mixtral("grouped_mm")
    expected, name = by_hand(model), the_product(model)
    with torch.no_grad():
        _, rec = run(model, TOKENS, capture=[f"{EXPERTS}/{name}", f"{EXPERTS}/{name}:input"])
    given = rec[f"{EXPERTS}/{name}:input", 1]
    ends = (given.kwargs["offs"] if isinstance(given, Inputs) and "offs" in given.kwargs else given.args[2]).tolist()
    parts = torch.tensor_split(rec[f"{EXPERTS}/{name}", 1], ends[:-1])
    assert len(parts) == 4
    for expert, rows in expected.items():
        assert torch.allclose(parts[expert], rows, rtol=1e-4, atol=1e-6)
    assert sum(len(part) for part in parts) == TOKENS.numel() * 2


def without(model: Any, expert: int) -> Tensor:
    """The output of a copy in which an expert returns nothing."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(EXPERTS).down_proj[expert] = 0
        return other(TOKENS).logits


@pytest.mark.parametrize("place", [0, 1])
def test_one_expert_is_ablated_where_it_runs(place: int) -> None:
    model = mixtral("eager")
    expert = list(by_hand(model))[place]
    with torch.no_grad():
        found, _ = run(model, TOKENS, edit={f"{EXPERTS}/linear#{2 * place + 1}": edits.zero()})
    assert torch.allclose(found.logits, without(model, expert), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not HAS_GROUPED_PRODUCT, reason=NO_GROUPED_PRODUCT)
def test_one_expert_is_ablated_among_grouped_ones() -> None:
    model = mixtral("grouped_mm")
    name, counts = the_product(model), {expert: len(rows) for expert, rows in by_hand(model).items()}
    expert = max(counts, key=lambda e: counts[e])
    first = sum(count for other, count in counts.items() if other < expert)

    def ablate(value: Tensor) -> Tensor:
        value = value.clone()
        value[first : first + counts[expert]] = 0
        return value

    with torch.no_grad():
        found, _ = run(model, TOKENS, edit={f"{EXPERTS}/{name}#1": ablate})
    assert torch.allclose(found.logits, without(model, expert), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.logits, model(TOKENS).logits, atol=1e-4)
