"""Mixtures of experts: the scores by which tokens are sent to experts, and what the experts make together."""

from __future__ import annotations

import dataclasses

from torchhook._recording.address import Site
from torchhook._roles.branches import ADDS, Branch, Reader, descends, site_of
from torchhook._roles.trace import Node

_PRODUCTS = frozenset({"linear", "matmul", "mm", "addmm", "einsum"})


@dataclasses.dataclass(slots=True)
class Experts:
    """The sites of one mixture; what is not there stands in ``refused`` with what was tried."""

    sites: dict[str, Site] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    chosen: Site | None = None
    """The indices of the experts that tokens go to."""
    count: int = 0
    shared: Site | None = None
    """What is added to that of the experts."""


def read(reader: Reader, branch: Branch) -> Experts | None:
    """The parts of a branch in which experts are chosen, or ``None``."""
    choices = [node for node in branch.calls if node.name == "topk"]
    if not choices:
        return None
    found, choice = Experts(), choices[-1]
    _router(reader, choice, found)
    _outputs(reader, branch, choice, found)
    return found


def _router(reader: Reader, choice: Node, found: Experts) -> None:
    """From the choice back to the product that the scores come from; what is between keeps one score per expert."""
    trace, user = reader.trace, choice
    token = choice.inputs[0][1]
    found.count = trace.shapes[token][-1]
    for _ in range(12):
        origin = trace.origin(token, user.start)
        if origin is None or trace.shapes[token][-1] != found.count or not origin.inputs:
            break
        if origin.name in _PRODUCTS:
            site = site_of(trace, token, user.start)
            leaf = choice.outputs[1][0] if len(choice.outputs) > 1 else None
            if site is not None and leaf is not None and trace.once(choice):
                found.sites["router"], found.chosen = site, choice.site(leaf=leaf)
                return
            break
        token, user = origin.inputs[0][1], origin
    found.refused["router"] = f"what {choice.path}/{choice.name} chooses from does not come from one product."


def _outputs(reader: Reader, branch: Branch, choice: Node, found: Experts) -> None:
    trace, token = reader.trace, reader.root(branch.token)
    before = branch.sum.start
    origin = trace.origin(token, before)
    if origin is not None and origin.name in ADDS and len(origin.inputs) == 2 and _several(reader, origin):
        parts = [(t, descends(trace, t, origin.start, choice)) for t in origin.taken()]
        routed = [t for t, chosen in parts if chosen]
        if len(routed) == 1:
            rest = next(t for t, chosen in parts if not chosen)
            found.shared = site_of(trace, rest, origin.start)
            token, before = routed[0], origin.start
    root = reader.root(token, before)
    ends = [node.start for node in trace.takers.get(root, ()) if node.op is not None and node.name not in ADDS]
    last = max((n.end for n in trace.makers.get(root, ()) if n.op is None), default=-1)
    site = site_of(trace, root, max([before if root == token else min(ends, default=before), last]))
    if site is None:
        found.refused["experts"] = "what the experts make together is returned by no module and no operation."
    else:
        found.sites["experts"] = site


def _several(reader: Reader, node: Node) -> bool:
    shapes = reader.trace.shapes
    return all(shapes[t][-1:] == shapes[node.made()[0]][-1:] for t in node.taken())
