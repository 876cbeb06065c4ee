"""``python -m tests.programs --count 10000 --seed 1``: hunt for programs of which a session says something wrong."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from tests.programs.hunt import counterexample, programs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="how many programs torch itself can differentiate")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed; another one by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.count} programs from seed {options.seed} on")
    counts: Counter[str] = Counter()
    for judged in programs(options.count, options.seed):
        counts.update(judged.verdict.counts)
        if judged.verdict.wrong:
            counts["counterexamples"] += 1
            print(f"\n{counterexample(judged)}", flush=True)
    print(", ".join(f"{what}: {number}" for what, number in sorted(counts.items())))
    return min(counts["counterexamples"], 1)


if __name__ == "__main__":
    raise SystemExit(main())
