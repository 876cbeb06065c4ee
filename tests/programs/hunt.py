"""Draw programs, judge them, and shrink those that show something wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from tests.programs.draw import draw
from tests.programs.judge import Verdict, judge
from tests.programs.show import script
from tests.programs.shrink import shrink


class Judged(NamedTuple):
    seed: int
    source: str
    verdict: Verdict


def programs(number: int, first: int) -> Iterator[Judged]:
    """The first ``number`` programs from a seed on that torch can run and differentiate."""
    found = 0
    for seed in count(first):
        if found == number:
            return
        source = draw(seed)
        verdict = judge(source, seed)
        if not verdict.discarded:
            found += 1
            yield Judged(seed, source, verdict)


def counterexample(judged: Judged) -> str:
    """A short script that shows the first thing that is wrong."""
    kind, seed = judged.verdict.wrong[0].kind, judged.seed

    def is_wrong(source: str) -> bool:
        return any(wrong.kind == kind for wrong in judge(source, seed, kind).wrong)

    short = shrink(judged.source, is_wrong)
    return f"# found with seed {seed}\n{script(short, judge(short, seed, kind).wrong)}"
