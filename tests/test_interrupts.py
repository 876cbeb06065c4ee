"""An interrupt at any line leaves nothing behind: a sample for each tool; ``make hunt`` takes every line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interrupts import SCENARIOS

SLOW = {"extract": 6, "cam": 12, "sweep": 20, "layers": 12, "diff": 20}  # a whole run for each point takes its time


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_leaves_neither_hooks_nor_modes_nor_flags(name: str) -> None:
    """In a process of its own: an exception that a trace function raises may stay on the interpreter's own stack."""
    command = [sys.executable, "-m", "tests.interrupts", name, "--sample", str(SLOW.get(name, 40))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
