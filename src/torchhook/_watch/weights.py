"""Parameters as they were at the beginning of a step, to know how far the step moved them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchhook._watch.statistics import PIECE, Ledger, flatten, measurable, norm


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
                norms[site] = ledger.note(_distance(parameter.detach(), copy))
        self._now = {}
        return norms


def _distance(one: Tensor, two: Tensor) -> Tensor:
    one, two = flatten(one), flatten(two)
    if not one.is_cpu or one.numel() <= PIECE:
        return norm(one - two)
    scratch = torch.empty(PIECE, dtype=one.dtype)
    gaps = (torch.sub(a, b, out=scratch[: len(a)]) for a, b in zip(one.split(PIECE), two.split(PIECE), strict=True))
    return norm(torch.stack([norm(gap) for gap in gaps]))
