"""Parameters as they were at the beginning of a step, to know how far the step moved them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch import Tensor

from torchhook._core.sharding import Home
from torchhook._values.elements import UNREADABLE, measurable
from torchhook._values.moments import distance
from torchhook._values.subclasses import local
from torchhook._watch.shared import Shared, part_norm
from torchhook._watch.statistics import Ledger


class Weights:
    """One copy of every watched parameter, made once and filled again at each measured step."""

    def __init__(self, updates: bool) -> None:
        self._updates = updates
        self._copies: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}

    def begin(self, homes: Iterable[tuple[str, Home]], ledger: Ledger, shared: Shared) -> dict[str, int]:
        """Remember what of the parameters lies on this rank; where its norms are in the ledger."""
        self._now, norms = {}, {}
        for site, home in homes:
            # A part may have no elements: its rank takes part in the exchange all the same.
            if measurable(home.value) or (home.groups and not local(home.value).numel()):
                with contextlib.suppress(*UNREADABLE):  # subclasses that cannot be computed with
                    norms[site] = ledger.note(part_norm(home.value))
                    self._now[site] = home.value
                    shared.weights[site] = home.groups
        self._copies = {site: copy for site, copy in self._copies.items() if site in self._now}
        for site, value in self._now.items() if self._updates else ():
            self._copy(site, local(value.detach()))
        return norms

    def clear(self) -> None:
        self._copies, self._now = {}, {}

    def _copy(self, site: str, parameter: Tensor) -> None:
        copy = self._copies.get(site)
        if copy is None or copy.shape != parameter.shape or copy.dtype != parameter.dtype:
            self._copies[site] = parameter.clone()
        else:
            copy.copy_(parameter)

    def end(self, ledger: Ledger) -> dict[str, int]:
        """How far the parameters went: where the distances are in the ledger."""
        norms = {}
        for site, parameter in self._now.items():
            copy, value = self._copies.get(site), local(parameter.detach())
            if copy is not None and copy.shape == value.shape and copy.device == value.device:
                far = distance(value, copy) if measurable(value) else part_norm(value)
                norms[site] = ledger.note(far)
        self._now = {}
        return norms
