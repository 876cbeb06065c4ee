"""What every test needs: a torch that survives here, torchvision beside it, one thread, the same random numbers."""

from __future__ import annotations

import gc
import os
import random
import zlib

import numpy as np
import pytest
from hypothesis import settings

from tests import cpu_isa
from tests.compatibility import pytest_addoption, pytest_configure  # noqa: F401  (hooks are found by their names)

# Before torch is imported. The workers of pytest-xdist inherit what the first process found.
SURVIVES_BY = {} if "PYTEST_XDIST_WORKER" in os.environ else cpu_isa.needed(os.environ)
os.environ.update(SURVIVES_BY)

import torch  # noqa: E402

torch.set_num_threads(1)
# No deadline: machines are noisy. The same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("torchhook", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1_000)
settings.load_profile("torchhook")


def pytest_report_header() -> list[str]:
    """Say what was set: with it, torch computes otherwise than a user of this machine would see."""
    return [f"torch dies by a signal here without {name}={value}" for name, value in SURVIVES_BY.items()]


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


_seed(0)  # for what test modules draw when they are imported


def _sessions_open() -> int:
    """How many sessions hold the compiler off: while there is one, models run eagerly and nothing is compiled."""
    from torchhook._core.hooks import eager_stance

    if eager_stance._holders:
        gc.collect()  # one may be held by the traceback of an expected error, which knows itself
    return len(eager_stance._holders)


_open_before = 0  # a test that is skipped may have no setup, and has a teardown


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers whether it runs alone, among others, or on another worker.

    And hears nothing that is said once in a process: it would depend on which test comes first.
    """
    from torchhook._core.hooks import eager_stance

    global _open_before
    eager_stance.said = True
    _open_before = _sessions_open()
    _seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test closes what it opens: its sessions would change what the tests after it see."""
    if _sessions_open() > _open_before:
        pytest.fail("this test leaves a session open")


def _declare_missing_operators() -> None:
    """torchvision's wheels are built for CUDA torch: beside a CPU build, its import misses two operators."""
    try:
        import torchvision
    except (RuntimeError, AttributeError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # it must outlive the import
        import sys

        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision  # noqa: F401


_declare_missing_operators()
