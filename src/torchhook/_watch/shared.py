"""Values that lie on several ranks: each measures its part, and the numbers are put together when the step is over.

One exchange for each step and group of ranks, of a few numbers for each site. A rank that watches alone is told so
once, and its numbers are then those of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchhook._core.ranks import Together
from torchhook._core.sharding import gathered
from torchhook._values.elements import measurable
from torchhook._values.moments import norm
from torchhook._values.statistics import Measured
from torchhook._values.subclasses import local
from torchhook.errors import TrainingWarning, warn

Part = dict[str, Any]
"""What one rank knows of a site: the parts that it measured, and norms by name."""
Groups = tuple[Any, ...]
"""The groups of ranks that something lies on."""


class Shared:
    """What all ranks together know of sites that lie on several of them."""

    def __init__(self, what: str) -> None:
        self.together: Together = Together(what)
        self._alone = False

    def merge(self, mine: Mapping[str, Part], lie: Mapping[str, Groups], by_hand: bool) -> dict[str, Part]:
        """What all ranks know together, of the sites that lie on several of them.

        ``by_hand`` says that the step did not end with the next call of the model, to which all ranks come.
        """
        by_groups: dict[Groups, list[str]] = {}
        # In one order on all ranks: each exchange has to meet its own.
        for site in sorted(site for site in mine if lie.get(site)):
            by_groups.setdefault(lie[site], []).append(site)
        found: dict[str, Part] = {}
        for groups, sites in by_groups.items():
            if self._is_alone(groups, by_hand):
                break
            ranks = gathered({site: mine[site] for site in sites}, groups)
            found |= {site: _merged([rank[site] for rank in ranks if site in rank]) for site in sites}
        return found

    def _is_alone(self, groups: Groups, by_hand: bool) -> bool:
        if self._alone or (self.together.meet(groups) if by_hand else not self.together.missing(groups)):
            return self._alone
        self._alone = True
        warn(
            "another rank does not watch the same, or ended a step elsewhere: of values that lie on several ranks, the "
            "statistics are those of this rank's part from here on. Open and close the watch on every rank, and log on "
            "one.",
            TrainingWarning,
        )
        return True


def _merged(parts: list[Part]) -> Part:
    names = {name: None for part in parts for name in part}
    return {name: _joined(name, [part[name] for part in parts if name in part]) for name in names}


def _joined(name: str, found: list[Any]) -> Any:
    if name == "parts":
        several: list[Measured] = [one for some in found for one in some]
        return several
    return math.hypot(*found)


def part_norm(tensor: Tensor) -> Tensor:
    """The norm of what lies on this rank, where that may be nothing."""
    return norm(tensor) if measurable(tensor) else local(tensor.detach()).new_zeros(())
