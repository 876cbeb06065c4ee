"""Statistics in columns, beside those that are put together one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torchhook._values.statistics import Measure, summarize
from torchhook._watch.statistics import STATISTICS
from torchhook._watch.tables import Table

SIZES = [1, 7, 100, 5, 3, 9, 2]
NUMBERS = np.array(
    [
        [0.5, 0.0, 0.5, 0.5, 1.0, 0.0],
        [-3.0, 2.25, -5.0, 1.0, 6.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [math.nan, math.nan, math.nan, math.nan, 5.0, 2.0],
        [math.inf, math.nan, 1.0, math.inf, 3.0, 0.0],
        [1e200, 1e300, -1e201, 1e201, 9.0, 0.0],
        [math.nan, math.nan, -math.inf, math.inf, 2.0, 0.0],
    ]
)


@pytest.mark.parametrize("wanted", [[n for n in STATISTICS if n != "histogram"], ["std"], ["zeros", "nans"], ["max"]])
def test_all_rows_at_once_say_what_each_says_alone(wanted: list[str]) -> None:
    table, measure = Table(SIZES, NUMBERS), Measure(wanted, bins=4)
    for at, found in enumerate(table.summaries(wanted)):
        expected = summarize([table.measured(at, measure)], wanted)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-14, nan_ok=True), (at, name)
            assert type(found[name]) is type(value), (at, name)
