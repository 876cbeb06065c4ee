"""Parameters as they were at the beginning of a step, to know how far the step moved them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchhook._values.elements import measurable
from torchhook._values.moments import distance, norm
from torchhook._watch.statistics import Ledger


class Weights:
    """One copy of every watched parameter, made once and filled again at each measured step."""

    def __init__(self, updates: bool) -> None:
        self._updates = updates
        self._copies: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}

    def begin(self, parameters: Iterable[tuple[str, Tensor]], ledger: Ledger) -> dict[str, int]:
        """Remember the parameters; where their norms are in the ledger."""
        self._now = {site: parameter for site, parameter in parameters if measurable(parameter)}
        self._copies = {site: copy for site, copy in self._copies.items() if site in self._now}
        norms = {}
        for site, parameter in self._now.items():
            if self._updates:
                self._copy(site, parameter.detach())
            norms[site] = ledger.note(norm(parameter))
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
            copy = self._copies.get(site)
            if copy is not None and copy.shape == parameter.shape and copy.device == parameter.device:
                norms[site] = ledger.note(distance(parameter.detach(), copy))
        self._now = {}
        return norms
