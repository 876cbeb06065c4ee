"""Parameters as they were at the beginning of a step, to know how far the step moved them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchhook._core.sharding import Home
from torchhook._torch import foreach
from torchhook._values.elements import UNREADABLE, is_alike, measurable
from torchhook._values.moments import distance
from torchhook._values.subclasses import local
from torchhook._watch.ledger import Key, Ledger, Several
from torchhook._watch.shared import Groups, part_norm

_PLAIN = (Tensor, torch.nn.Parameter)
_FULL = (torch.float32, torch.float64)  # a difference in half precision is not exact


class Weights:
    """One copy of every watched parameter, made once and filled again at each measured step."""

    def __init__(self, updates: bool) -> None:
        self._updates = updates
        self._copies: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self._same: _Same | None = None
        """How all of them are taken, where nothing has changed since the step before."""

    def begin(self, homes: Mapping[str, Home], ledger: Ledger, lie: dict[str, Groups]) -> dict[str, Key]:
        """Remember what of the parameters lies on this rank; where its norms are in the ledger."""
        if self._same is not None and self._same.holds(homes):
            lie |= self._same.lie
            with torch.no_grad():
                if self._updates:
                    for parameters, copies in self._same.groups:
                        foreach.copy_(copies, parameters)
                return self._same.norms("weights", [parameters for parameters, _ in self._same.groups], ledger)
        self._now, self._same, norms = {}, None, {}
        together: dict[str, Tensor] = {}
        for site, home in homes.items():
            # A part may have no elements: its rank takes part in the exchange all the same.
            if measurable(home.value) or (home.groups and not local(home.value).numel()):
                with contextlib.suppress(*UNREADABLE):  # subclasses that cannot be computed with
                    if _goes_together(home.value):
                        together[site] = home.value.detach()
                    norms[site] = None if site in together else ledger.norm(home.value)
                    self._now[site] = home.value
                    lie[site] = home.groups
        norms |= _norms(together, ledger)
        if self._updates:
            self._copy()
        if together.keys() == homes.keys() == self._now.keys() and not any(lie.get(site) for site in homes):
            self._same = _Same(homes, list(_alike_groups(together)), self._copies, {site: lie[site] for site in homes})
        return norms

    def clear(self) -> None:
        self._copies, self._now, self._same = {}, {}, None

    def _copy(self) -> None:
        self._copies = {site: copy for site, copy in self._copies.items() if site in self._now}
        again: dict[str, Tensor] = {}
        for site, parameter in self._now.items():
            value, copy = local(parameter.detach()), self._copies.get(site)
            if copy is None or not is_alike(copy, value):
                self._copies[site] = value.clone()
            elif type(value) is Tensor:
                again[site] = value
            else:
                copy.copy_(value)
        for sites in _alike_groups(again):
            foreach.copy_([self._copies[site] for site in sites], [again[site] for site in sites])

    def end(self, ledger: Ledger) -> dict[str, Key]:
        """How far the parameters went: where the distances are in the ledger."""
        if self._same is not None and self._updates:
            if self._same.holds(self._same.homes):
                with torch.no_grad():
                    for parameters, copies in self._same.groups:
                        foreach.sub_(copies, parameters)
                return self._same.norms("updates", [copies for _, copies in self._same.groups], ledger)
            self._now = {site: home.value for site, home in self._same.homes.items()}
            self._same = None
        norms: dict[str, Key] = {}
        together: dict[str, Tensor] = {}
        for site, parameter in self._now.items():
            copy, value = self._copies.get(site), local(parameter.detach())
            if copy is None or copy.shape != value.shape or copy.device != value.device:
                continue
            norms[site] = None
            if _goes_together(parameter) and is_alike(copy, value):
                together[site] = value
            else:
                norms[site] = ledger.note(distance(value, copy) if measurable(value) else part_norm(value))
        # The copies are filled anew when the next step begins, so the differences can take their place.
        for sites in _alike_groups(together):
            foreach.sub_([self._copies[site] for site in sites], [together[site] for site in sites])
        norms |= _norms({site: self._copies[site] for site in together}, ledger)
        self._now = {}
        return norms


class _Same:
    """Plain parameters, all of which go together, and their copies: what is asked of each is asked once."""

    def __init__(
        self,
        homes: Mapping[str, Home],
        sites: list[list[str]],
        copies: Mapping[str, Tensor],
        lie: dict[str, Groups],
    ) -> None:
        self.homes, self.lie, self._sites = homes, lie, sites
        self.groups = [([homes[s].value for s in some], [copies[s] for s in some if s in copies]) for some in sites]
        self._kinds = self._kinds_now()
        self._keys: dict[str, dict[str, Key]] = {}

    def _kinds_now(self) -> list[Any]:
        # What ``.data`` and ``.to`` can change while the parameter stays the same.
        return [(p.device, p.dtype, p.shape, type(p)) for parameters, _ in self.groups for p in parameters]

    def holds(self, homes: Mapping[str, Home]) -> bool:
        return homes is self.homes and self._kinds_now() == self._kinds

    def norms(self, what: str, groups: list[list[Tensor]], ledger: Ledger) -> dict[str, Key]:
        """Where the norms of the tensors are in the ledger, by site: the same in every step."""
        for i, tensors in enumerate(groups):
            ledger.hold_all((what, i), foreach.norms(tensors))
        if what not in self._keys:
            places = [
                (site, Several((what, i), at)) for i, sites in enumerate(self._sites) for at, site in enumerate(sites)
            ]
            self._keys[what] = dict(places)
        return self._keys[what]


def _goes_together(tensor: Tensor) -> bool:
    """Whether one launch for many tensors is the fastest way. A CPU has no launches, and more exact ways to a norm."""
    return tensor.is_cuda and type(tensor) in _PLAIN and tensor.dtype in _FULL


def _alike_groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The sites by device and dtype: torch takes only those together."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for site, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(site)
    return iter(groups.values())


def _norms(tensors: Mapping[str, Tensor], ledger: Ledger) -> dict[str, Key]:
    found: dict[str, Key] = {}
    for sites in _alike_groups(tensors):
        found |= zip(sites, ledger.note_all(foreach.norms([tensors[site] for site in sites])), strict=True)
    return found
