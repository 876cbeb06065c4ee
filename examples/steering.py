"""Steer a language model while it generates: add the difference of two prompts to the stream between its blocks.

python examples/steering.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits, transforms


@torch.no_grad()
def direction(model: nn.Module, wanted: Tensor, unwanted: Tensor, site: str) -> Tensor:
    """What the stream says of one prompt and not of the other, at their last tokens."""
    last = transforms.tokens("last")
    one, other = (th.run(model, ids, capture=site, transform=last, stop=True)[1][site] for ids in (wanted, unwanted))
    return one.mean(0) - other.mean(0)


@torch.no_grad()
def steered(model: Any, ids: Tensor, site: str, vector: Tensor, strength: float = 4.0, **options: Any) -> Tensor:
    """A generation with the vector added at every step after the prompt."""
    edit = edits.only(edits.add(strength * vector), steps=slice(1, None))
    with th.edit(model, {site: edit}):
        return model.generate(ids, do_sample=False, **options)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpt2, tokenizer = AutoModelForCausalLM.from_pretrained("gpt2"), AutoTokenizer.from_pretrained("gpt2")
    love, hate, prompt = (tokenizer(text, return_tensors="pt").input_ids for text in ("Love", "Hate", "I think that"))
    vector = direction(gpt2, love, hate, "@resid_post.6")
    print(tokenizer.decode(steered(gpt2, prompt, "@resid_post.6", vector, max_new_tokens=20)[0]))
