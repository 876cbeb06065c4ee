"""What was found so far: names with sites, names that are refused, and what is claimed of them."""

from __future__ import annotations

import dataclasses

from torchhook._recording.address import Site
from torchhook._roles.claims import Claim


@dataclasses.dataclass(slots=True)
class Findings:
    """Names, sites and claims, before any of it is tried."""

    sites: dict[str, Site] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    claims: list[Claim] = dataclasses.field(default_factory=list)
    routers: dict[str, tuple[int, Claim]] = dataclasses.field(default_factory=dict)
    """Names of scores over experts, each with the expert that is to be chosen."""
    tokenwise: dict[str, tuple[str, Claim]] = dataclasses.field(default_factory=dict)
    """Names of feed-forward parts, each with the name of what it is made from."""
    tokens: dict[str, Claim] = dataclasses.field(default_factory=dict)
    """Names of queries, each with what must hold when one token of them changes, for them and for keys."""
    outside: dict[str, tuple[str, Claim]] = dataclasses.field(default_factory=dict)
    """Names of what is made from other values than the stream's, each with the name of where that begins."""
    branches: dict[int, str] = dataclasses.field(default_factory=dict)
    """Names of branches by id, while their block is read."""

    def name(self, name: str, site: Site) -> Site:
        self.sites[name] = site
        return site

    def refuse(self, name: str, why: str) -> None:
        self.sites.pop(name, None)
        self.refused.setdefault(name, why)

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)

    def route(self, name: str, expert: int, claim: Claim) -> None:
        self.routers[name] = (expert, claim)
