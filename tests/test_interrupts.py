"""An interrupt at any line leaves nothing behind: a sample for each tool; ``make hunt`` takes every line."""

from __future__ import annotations

import pytest

from tests.interrupts import SCENARIOS, hunt

SLOW = {"extract": 6, "cam": 12, "sweep": 20, "layers": 12, "diff": 20}  # a whole run for each point takes its time


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_leaves_neither_hooks_nor_modes_nor_flags(name: str) -> None:
    assert hunt([name], sample=SLOW.get(name, 40)) == {name: []}
