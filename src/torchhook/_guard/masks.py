"""Infinities that are there on purpose: masks, and what becomes of them on the way to a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from torchhook._guard.events import Event
from torchhook._guard.findings import Statistics

Allow = Literal["-inf", "inf"]

# Many models mask with the lowest finite number, which is safe from softmax(all -inf) = NaN (pytorch#41508). Adding to
# it, or casting it to a narrower type, makes it an infinity after all: still the mask, not an overflow.
_ADDS = frozenset({"add", "add_", "sub", "sub_"})
_CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16", "float"})


class Masks:
    """Which infinities are taken for masks."""

    def __init__(self, allow: Allow | None) -> None:
        self._negative = allow is not None
        self._positive = allow == "inf"

    def permits(self, found: Statistics) -> bool:
        """Whether all that is not finite in a tensor may be there on purpose. NaN never is."""
        return not found.nan and (self._positive or not found.inf) and (self._negative or not found.neg_inf)

    def is_mask(self, found: Statistics) -> bool:
        """Whether a model's input looks like a mask to be added to scores: -inf, and nothing above 0."""
        # Data with a -inf in it also has numbers above 0, unless its name says what it is.
        return self.permits(found) and (found.max is None or found.max <= 0 or "mask" in found.name)

    def is_deliberate(
        self, event: Event, inputs: Sequence[Statistics], outputs: Sequence[Statistics], seen_inside: bool
    ) -> bool:
        """Whether an infinity is one that was written down, or only what became of one, maybe ``seen_inside``."""
        if not all(self.permits(found) for found in outputs):
            return False
        if event.location.op is None:
            # A mask that is kept from before is returned as it is; what depends on weights was made by someone.
            return seen_inside or not event.learned or any(not found.finite and self.permits(found) for found in inputs)
        lowest = min((torch.finfo(s.dtype).min for s in outputs if s.dtype.is_floating_point), default=-math.inf)
        if any(constant == math.inf or constant <= lowest for constant in event.constants):
            return True
        for origin, found in zip(event.origins, inputs, strict=True):
            if origin.learned:  # nobody masks with a parameter: an infinite one is a fault
                continue
            if not found.finite and self.permits(found):
                return True
            if found.min is not None and found.min <= lowest and event.location.op in _ADDS | _CASTS:
                return True
        return False
