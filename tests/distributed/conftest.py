"""Runs the scenarios of a module once, and hands what they returned to its tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.distributed import ranks


@pytest.fixture(scope="session")
def results() -> Callable[[str], ranks.Results]:
    return functools.cache(ranks.run)
