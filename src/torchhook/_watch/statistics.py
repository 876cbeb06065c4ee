"""Which statistics there are."""

from __future__ import annotations

OF_VALUES = ("mean", "std", "min", "max", "zeros", "nans", "norm", "histogram")
STATISTICS = (*OF_VALUES, "dead", "grad_norm", "update_ratio")
DEFAULT = tuple(name for name in STATISTICS if name != "histogram")
