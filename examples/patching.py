"""Indirect objects, patched: which parts of a transformer carry the name? Standard names, so any model will do.

python examples/patching.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import torchhook as th
from torchhook.types import Sweep


def patched(model: nn.Module, clean: Tensor, corrupted: Tensor, metric: Callable[[Any], Tensor]) -> dict[str, Sweep]:
    """A quick estimate over everything, and the real sweep where it says that most happens."""
    everywhere = ["@attn_out.*", "@mlp_out.*", "@resid_post.*"]
    estimate = th.sweep(model, clean, corrupted, metric, sites=everywhere, estimate="gradient", progress=False)
    site, _ = estimate.best
    real = th.sweep(model, clean, corrupted, metric, sites=site, progress=False)
    heads = th.sweep(model, clean, corrupted, metric, sites="@z.*", over="head", progress=False)
    return {"estimate": estimate, "best": real, "heads": heads}


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpt2, tokenizer = AutoModelForCausalLM.from_pretrained("gpt2"), AutoTokenizer.from_pretrained("gpt2")
    story = "When Mary and John went to the store, {} gave a drink to"
    clean, corrupted = (tokenizer(story.format(name), return_tensors="pt").input_ids for name in ("John", "Mary"))
    mary, john = tokenizer(" Mary").input_ids[0], tokenizer(" John").input_ids[0]
    results = patched(gpt2, clean, corrupted, lambda out: out.logits[0, -1, mary] - out.logits[0, -1, john])
    words = [tokenizer.decode(token) for token in clean[0]]
    th.plot.sweep(results["estimate"], tokens=words).savefig("estimate.png")
    print(results["best"], results["heads"], sep="\n\n")
