"""Mixtures of experts: the scores by which tokens are sent to experts, and what the experts make together."""

from __future__ import annotations

import dataclasses
import math

from torchhook._recording.address import Site
from torchhook._roles.branches import ADDS, Branch, Reader, descends, is_norm, site_of
from torchhook._roles.trace import Node, Token
from torchhook._roles.weighing import Weighed, precedes

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
    after: list[Node] = dataclasses.field(default_factory=list)
    """Norms between that and the stream."""
    scaled: bool = False
    """Whether a factor stands between them too."""


def read(reader: Reader, branch: Branch) -> Experts | None:
    """The parts of a branch in which experts are chosen, or ``None``."""
    choices = [node for node in branch.calls if node.name == "topk"]
    if not choices:
        return None
    found, choice = Experts(), choices[-1]
    weighed, shapes = Weighed(reader, branch, choice), reader.trace.shapes
    tokens, rows = (math.prod(shapes[t][:-1]) for t in (reader.block.taken[1], choice.inputs[0][1]))
    others = [one for one in choices[:-1] if not precedes(reader.trace, one, choice)]
    if any(Weighed(reader, branch, other).meetings for other in others):
        found.refused |= dict.fromkeys(("router", "experts"), f"more than one choice weighs in {choice.path!r}.")
        return found
    if not weighed.meetings or rows != tokens:
        why = "by no score is anything weighed that is made from the stream"
        why = why if rows == tokens else f"{rows} times for {tokens} tokens"
        found.refused |= dict.fromkeys(("router", "experts"), f"{choice.path}/{choice.name} chooses, but {why}.")
        return found
    _router(reader, choice, found)
    _outputs(reader, branch, choice, found, weighed)
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


def _outputs(reader: Reader, branch: Branch, choice: Node, found: Experts, weighed: Weighed) -> None:
    trace = reader.trace
    token, before = _before_norms(reader, branch, found)
    origin = trace.origin(token, before)
    if origin is not None and origin.name in ADDS and len(origin.inputs) == 2 and _several(reader, origin):
        parts = [(t, descends(trace, t, origin.start, choice)) for t in origin.taken()]
        routed = [t for t, chosen in parts if chosen]
        if len(routed) == 1:
            rest = next(t for t, chosen in parts if not chosen)
            found.shared = site_of(trace, rest, origin.start)
            token, before = routed[0], origin.start
    if _mixes_more(reader, token, before, choice):
        found.refused["experts"] = "something that no expert made is in what they make together."
        return
    if (more := weighed.more(token, before)) is not None:
        found.refused["experts"] = f"{more.path}/{more.name} comes after what the experts make together, or is no sum."
        return
    root = reader.root(token, before)
    ends = [node.start for node in trace.takers.get(root, ()) if node.op is not None and node.name not in ADDS]
    last = max((n.end for n in trace.makers.get(root, ()) if n.op is None), default=-1)
    site = site_of(trace, root, max([before if root == token else min(ends, default=before), last]))
    if site is None:
        found.refused["experts"] = "what the experts make together is returned by no module and no operation."
    else:
        found.sites["experts"] = site


def _before_norms(reader: Reader, branch: Branch, found: Experts) -> tuple[Token, int]:
    """What a branch is before its norms and factors, which are no part of what experts make, and when it is taken."""
    trace, token, before = reader.trace, reader.root(branch.token), branch.sum.start
    for _ in range(8):
        modules = [n for n in trace.makers.get(token, ()) if n.op is None and n.end < before]
        norm = next((n for n in modules if is_norm(trace, n) and trace.once(n)), None)
        if norm is not None:
            found.after.insert(0, norm)
            token, before = reader.root(norm.taken()[0], norm.start), norm.start
            continue
        origin = trace.origin(token, before)
        if origin is None or origin.name not in ("mul", "mul_", "div") or len(origin.inputs) != 1:
            break
        found.scaled = True
        token, before = reader.root(origin.inputs[0][1], origin.start), origin.start
    return token, before


def _mixes_more(reader: Reader, token: Token, before: int, choice: Node) -> bool:
    """Whether what is made without the choice, a shared expert say, was added on the way to a tensor."""
    trace, waiting, seen = reader.trace, [(token, before)], set[int]()
    while waiting:
        current, end = waiting.pop()
        origin = trace.origin(current, end)
        if origin is None or origin.end in seen or origin.end < choice.start:
            continue
        seen.add(origin.end)
        routed = [t for t in origin.taken() if descends(trace, t, origin.start, choice)]
        others = [t for t in origin.taken() if t not in routed and t in trace.floating]
        if origin.name in ADDS and routed and any(_is_made(reader, t, origin) for t in others):
            return True
        waiting += [(t, origin.start) for t in routed]
    return False


def _is_made(reader: Reader, token: Token, taker: Node) -> bool:
    made = reader.branch(token, taker)
    return bool(made.contractions and made.reads)


def _several(reader: Reader, node: Node) -> bool:
    shapes = reader.trace.shapes
    return all(shapes[t][-1:] == shapes[node.made()[0]][-1:] for t in node.taken())
