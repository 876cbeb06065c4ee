"""Which instructions torch may use on this machine.

Some virtual machines advertise AMX and trap on it: a bfloat16 ``Linear`` on the CPU dies there by SIGILL, in torch
alone. oneDNN, which picks the instructions, reads its limit from ``ONEDNN_MAX_CPU_ISA``. Run as a script this prints
that assignment where it is needed, and nothing elsewhere: the Makefile starts its programs with it. ``conftest.py``
does the same for the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
LIMITS = ("AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2")  # from the highest down
SECONDS = 120  # torch's first import from a cold disk is slow; this is only there so that nothing waits for ever

# It runs in a child, because that is what dies. An operation that this torch does not have is no answer: it goes on.
PROBE = """
import contextlib
with contextlib.suppress(ImportError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
from torch import nn
for dtype in (torch.bfloat16, torch.float16):
    for width in (8, 64, 256):
        for layer, shape in ((nn.Linear(width, width), (32, width)), (nn.Conv2d(width, width, 3), (2, width, 12, 12))):
            with contextlib.suppress(RuntimeError):
                layer.to(dtype)(torch.ones(shape, dtype=dtype, requires_grad=True)).sum().backward()
"""
COMMAND = (sys.executable, "-c", PROBE)
# Only in a virtual environment: any other Python belongs to the whole machine.
CACHE = Path(sys.prefix) / "cpu-isa.json" if sys.prefix != sys.base_prefix else None


def needed(
    environment: Mapping[str, str],
    command: Sequence[str] = COMMAND,
    cache: Path | None = CACHE,
    seconds: float = SECONDS,
) -> dict[str, str]:
    """What to add to the environment so that torch survives: nothing, or the highest limit under which it does."""
    if VARIABLE in environment:  # whoever set it knows the machine
        return {}
    machine = _machine()
    if cache is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(cache.read_text())
            if known["machine"] == machine:
                return dict(known["needed"])
    found = _probed(environment, command, seconds)
    if cache is not None and found is not None:
        with contextlib.suppress(OSError):
            cache.write_text(json.dumps({"machine": machine, "needed": found}))
    return found or {}


def _probed(environment: Mapping[str, str], command: Sequence[str], seconds: float) -> dict[str, str] | None:
    """What is needed; None where nothing is known: the first child said nothing, or no limit helps."""
    dies = _dies(environment, command, seconds)
    if not dies:
        return None if dies is None else {}
    limits = ({VARIABLE: name} for name in LIMITS)
    return next((limit for limit in limits if _dies({**environment, **limit}, command, seconds) is False), None)


def _dies(environment: Mapping[str, str], command: Sequence[str], seconds: float) -> bool | None:
    """Whether a signal ends the command; None when that is not known: it hangs, or torch cannot be imported."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode < 0 if done.returncode <= 0 else None


def _machine() -> list[str]:
    """What the answer depends on: the processor, what it says it can do, and torch."""
    try:
        facts = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor = [line for line in facts if line.startswith(("model name", "flags"))]
    except OSError:
        processor = [platform.processor(), platform.machine()]
    return [*processor, metadata.version("torch")]


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in needed(os.environ).items()))
