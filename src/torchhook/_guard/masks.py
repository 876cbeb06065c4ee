"""Infinities that are there on purpose: masks, and what becomes of them on the way to a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from torchhook._guard.events import Passing
from torchhook._guard.findings import Statistics

Allow = Literal["-inf", "inf"]

# Where the lowest number stands for -inf, one of these makes it one.
_ADDS = frozenset({"add", "add_", "sub", "sub_"})
_CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16", "float"})


class Allowed:
    """Which infinities may be there on purpose."""

    def __init__(self, allow: Allow | None) -> None:
        self._negative = allow is not None
        self._positive = allow == "inf"

    def permits(self, found: Statistics) -> bool:
        """Whether all that is not finite in a tensor may be there on purpose. NaN never is."""
        return not found.nan and (self._positive or not found.inf) and (self._negative or not found.neg_inf)

    def is_mask(self, found: Statistics) -> bool:
        """Whether a model's input looks like a mask to be added to scores: -inf, and nothing above 0."""
        return self.permits(found) and (found.max is None or found.max <= 0 or "mask" in found.name)

    def is_deliberate(
        self, it: Passing, inputs: Sequence[Statistics], outputs: Sequence[Statistics], seen_inside: bool
    ) -> bool:
        """Whether an infinity is one that was written down, or only what became of one, maybe ``seen_inside``."""
        if not all(self.permits(found) for found in outputs):
            return False
        if it.place.op is None:
            # A mask that is kept from before is returned as it is; what depends on weights was made by someone.
            return seen_inside or not it.learned or any(not found.finite and self.permits(found) for found in inputs)
        lowest = min((torch.finfo(s.dtype).min for s in outputs if s.dtype.is_floating_point), default=-math.inf)
        if any(constant == math.inf or constant <= lowest for constant in it.constants):
            return True
        for origin, found in zip(it.origins, inputs, strict=True):
            if origin.learned:
                continue
            if not found.finite and self.permits(found):
                return True
            if found.min is not None and found.min <= lowest and it.place.op in _ADDS | _CASTS:
                return True
        return False
