"""Activation patching over blocks and positions of a GPT-2: ``th.sweep``, run and estimated, and a loop by hand.

    python benchmarks/sweep.py [--rounds 5] [--json out.json]

The two run in turns in one process, and the matrices are compared. The ratio is what counts, not the seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._sweep.api import sweep

SIZES = {
    "tiny (4 blocks of 128)": {"n_layer": 4, "n_embd": 128, "n_head": 4},
    "small (8 blocks of 256)": {"n_layer": 8, "n_embd": 256, "n_head": 8},
    "gpt2 (12 blocks of 768)": {"n_layer": 12, "n_embd": 768, "n_head": 12},
}
TOKENS = 15  # as in "When Mary and John went to the store, John gave a drink to"


def model(**size: int) -> nn.Module:
    # transformers imports torchvision, whose wheels miss operators beside a CPU torch; the tests' setup declares them.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("tests.conftest")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, use_cache=False, **ends, **size)).eval()


def prompts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    clean = torch.randint(1000, (1, TOKENS))
    corrupted = clean.clone()
    corrupted[0, [1, 9]] = clean[0, [3, 1]]
    return clean, corrupted


def logit_difference(output: Any) -> Tensor:
    return output.logits[0, -1, 7] - output.logits[0, -1, 11]


def by_hand(gpt2: Any, clean: Tensor, corrupted: Tensor) -> Tensor:
    """What people write: cache with hooks, then one forward pass for each block and position."""
    blocks = gpt2.transformer.h
    cache: dict[int, Tensor] = {}

    def keep(i: int) -> Callable[..., None]:
        return lambda module, args, output: cache.__setitem__(i, _hidden(output).clone())

    def put(i: int, position: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = _hidden(output).clone()
            hidden[:, position] = cache[i][:, position]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    matrix = torch.zeros(len(blocks), clean.shape[1])
    with torch.no_grad():
        handles = [block.register_forward_hook(keep(i)) for i, block in enumerate(blocks)]
        gpt2(clean)
        for handle in handles:
            handle.remove()
        for i, block in enumerate(blocks):
            for position in range(clean.shape[1]):
                handle = block.register_forward_hook(put(i, position))
                matrix[i, position] = logit_difference(gpt2(corrupted))
                handle.remove()
    return matrix


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def measure(name: str, size: dict[str, int], rounds: int, threads: int) -> dict[str, Any]:
    gpt2, (clean, corrupted) = model(**size), prompts()
    torch.set_num_threads(threads)
    hand, ours, gradient = [], [], []
    for i in range(rounds + 1):  # the first round warms up
        start = time.perf_counter()
        expected = by_hand(gpt2, clean, corrupted)
        middle = time.perf_counter()
        found = sweep(gpt2, clean, corrupted, logit_difference, sites="transformer.h.*", progress=False)
        end = time.perf_counter()
        sweep(gpt2, clean, corrupted, logit_difference, sites="transformer.h.*", estimate="gradient", progress=False)
        last = time.perf_counter()
        if i:
            gradient.append(last - end)
            hand.append(middle - start)
            ours.append(end - middle)
    return {
        "model": name,
        "patches": expected.numel(),
        "by hand (s)": statistics.median(hand),
        "th.sweep (s)": statistics.median(ours),
        "ratio": statistics.median(o / h for o, h in zip(ours, hand, strict=True)),
        "ratio of the estimate": statistics.median(g / h for g, h in zip(gradient, hand, strict=True)),
        "largest difference": (expected - found.values).abs().max().item(),
        "notes": found.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(name, size, options.rounds, options.threads) for name, size in SIZES.items()]
    ratios = f"{'ratio':>8}{'estimate':>10}"
    print(f"{'model':26}{'patches':>9}{'by hand':>10}{'th.sweep':>10}{ratios}{'largest difference':>20}")
    for r in results:
        times = f"{r['by hand (s)']:>9.2f}s{r['th.sweep (s)']:>9.2f}s"
        ratios = f"{r['ratio']:>8.2f}{r['ratio of the estimate']:>10.3f}"
        print(f"{r['model']:26}{r['patches']:>9}{times}{ratios}{r['largest difference']:>20.1e}", *r["notes"])
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2))


if __name__ == "__main__":
    main()
