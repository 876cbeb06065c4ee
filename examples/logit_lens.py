"""What would a model say after each of its blocks?

python examples/logit_lens.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th


@torch.no_grad()
def guesses(model: nn.Module, ids: Tensor, tokenizer: Any = None) -> Any:
    """The model's own last norm and head on the stream after every block."""
    with th.capture(model, "@resid_pre.0", "@resid_post.*") as rec:
        model(ids)
    return th.lens(model, rec, tokenizer=tokenizer)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpt2, tokenizer = AutoModelForCausalLM.from_pretrained("gpt2"), AutoTokenizer.from_pretrained("gpt2")
    found = guesses(gpt2, tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids, tokenizer)
    print(found)
    th.plot.lens(found).savefig("lens.png")
