"""Which attention heads does an answer need? Set one after the other to zero.

python examples/head_ablation.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits


@torch.no_grad()
def ablated(model: nn.Module, ids: Tensor, metric: Callable[[Any], Tensor], blocks: int, heads: int) -> Tensor:
    """What the metric loses without each head: blocks × heads."""
    whole = metric(model(ids))
    lost = torch.zeros(blocks, heads)
    for block in range(blocks):
        for head in range(heads):
            # z: what each head gives, before the projection that joins them.
            with th.edit(model, {f"@z.{block}": edits.only(edits.zero(), heads=head)}):
                lost[block, head] = whole - metric(model(ids))
    return lost


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpt2, tokenizer = AutoModelForCausalLM.from_pretrained("gpt2"), AutoTokenizer.from_pretrained("gpt2")
    text = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt").input_ids
    mary, john = tokenizer(" Mary").input_ids[0], tokenizer(" John").input_ids[0]
    lost = ablated(gpt2, text, lambda out: out.logits[0, -1, mary] - out.logits[0, -1, john], 12, 12)
    print("most needed:", *[divmod(int(i), 12) for i in lost.flatten().topk(5).indices])
