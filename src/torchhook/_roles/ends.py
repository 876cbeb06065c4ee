"""Around the blocks: the embedding of tokens, the norm after the last block, the logits."""

from __future__ import annotations

import dataclasses

from torchhook._recording.address import Site
from torchhook._roles.branches import ADDS, attends, comes_from, is_norm, seen_as, site_of
from torchhook._roles.chain import Block, Chain
from torchhook._roles.trace import Node, Trace


@dataclasses.dataclass(slots=True)
class Ends:
    """The sites around the blocks; what is not there stands in ``refused`` with what was tried."""

    sites: dict[str, Site] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    lookup: Node | None = None
    """The call that looks tokens up."""
    norm: Node | None = None
    result: Site | None = None
    """Where the logits are in what the model returns."""


def embedding(trace: Trace, chain: Chain, found: Ends) -> None:
    """The module that looks up the rows of a matrix by integers that the model was called with."""
    inputs = [(leaf, token) for leaf, token in trace.nodes[-1].inputs if token in trace.integers]
    named = [token for leaf, token in inputs if leaf.split(".")[-1] in ("input_ids", "decoder_input_ids")]
    # There may be more positions than tokens, and both may be given.
    given = set(named or (token for _, token in inputs))
    lookups = [n for n in trace.nodes if n.name == "embedding" and given & {seen_as(trace, t) for t in n.taken()}]
    lookups = [node for node in lookups if _leads_to(trace, node, chain)]
    if not lookups:
        found.refused["embed"] = "no row of a matrix is looked up by integers that the model is called with."
        return
    # By rows: types of tokens, which may be given too, have few.
    node = max(lookups, key=lambda n: (_rows(trace, n), -n.start))
    modules = [n for n in trace.modules() if n.module is node.module]
    if len(modules) != 1 or len(modules[0].outputs) != 1 or modules[0].outputs[0][0]:
        runs = "runs more than once in a pass" if len(modules) != 1 else "returns more than one tensor"
        found.refused["embed"] = f"{node.path!r}, which looks tokens up, {runs}."
        return
    found.sites["embed"], found.lookup = modules[0].site(), node


def _leads_to(trace: Trace, node: Node, chain: Chain) -> bool:
    """Whether what goes into the first block is made from what a call made."""
    first = chain.blocks[0]
    return comes_from(trace, first.taken[1], first.node.start, set(node.made()))


def _rows(trace: Trace, node: Node) -> int:
    return max((trace.shapes[t][0] for t in node.taken() if t in trace.floating), default=0)


def final_norm(trace: Trace, chain: Chain, found: Ends) -> None:
    """The norm that what the last block returned goes into."""
    last = chain.blocks[-1]
    after = [n for n in trace.modules() if n.start > last.node.end and is_norm(trace, n) and last.made[1] in n.taken()]
    why = _goes_on(trace, last, after[0]) if len(after) == 1 else None
    if why is not None:
        found.refused["norm_final"] = f"{after[0].path!r} takes what the last block returns, but {why}."
    elif len(after) == 1 and trace.once(after[0]):
        found.sites["norm_final"], found.norm = after[0].site(), after[0]
    elif after:
        several = f"{len(after)} norms take" if len(after) > 1 else f"{after[0].path!r} runs more than once, and takes"
        found.refused["norm_final"] = f"{several} what the last block returns."
    else:
        found.refused["norm_final"] = "no module without matrices takes what the last block returns."


def _goes_on(trace: Trace, last: Block, norm: Node) -> str | None:
    """How the stream goes on past a norm, so that it is the first of one more block and no final one."""
    around = [n for n in trace.modules() if last.node.end < n.start < norm.start and norm.end < n.end]
    for node in around:
        if _is_block(trace, node, norm):
            return f"in {node.path!r}, which goes on as a block does"
    # Two ways from the last block: past the norm, and through it. Where they meet, it is no norm of all that follows.
    past, through = {last.made[1]}, set(norm.made())
    later = [n for n in trace.nodes if n.op is not None and n.start > last.node.end]
    for node in sorted(later, key=lambda n: n.end):
        if norm.start < node.start < norm.end:
            continue
        taken = set(node.taken())
        if taken & past and taken & through:
            return f"{node.path}/{node.name} adds to that what is made from the norm, so the stream goes on"
        for way in (past, through):
            if taken & way:
                way |= {token for token in node.made() if token in trace.floating}
    return None


def _is_block(trace: Trace, node: Node, norm: Node) -> bool:
    """Whether a call attends to what it makes from a norm, or adds up two values that it makes from it."""
    made = set(norm.made())
    for call in sorted((n for n in trace.nodes if n.op is not None), key=lambda n: n.end):
        if not (norm.end < call.start and call.end < node.end):
            continue
        taken = [token for token in call.taken() if token in made]
        if taken and (attends(trace, call) or (call.name in ADDS and len(taken) > 1)):
            return True
        made |= {token for token in call.made() if taken and token in trace.floating}
    return False


def logits(trace: Trace, found: Ends) -> None:
    """What the model returns under that name, or all that it returns, if that is not the stream."""
    root = trace.nodes[-1]
    named = [part for part in root.outputs if part[0].split(".")[-1] == "logits" and part[1] in trace.floating]
    bare = [part for part in root.outputs if part[1] in trace.floating]
    part = named[0] if named else bare[0] if bare and root.outputs[0][0] in ("", "0") else None
    if part is None:
        found.refused["logits"] = "nothing that the model returns is called logits, and it returns no tensor alone."
        return
    site = site_of(trace, part[1], root.end - 1)
    if site is None:
        site = root.site(leaf=part[0])
    if not named and not _after_head(trace, part[1]):
        found.refused["logits"] = "what the model returns does not come from a product with a matrix: it has no head."
        return
    found.sites["logits"], found.result = site, Site("", leaf=part[0])


def _after_head(trace: Trace, token: int) -> bool:
    origin = trace.origin(token)
    return origin is not None and origin.name in ("linear", "matmul", "addmm", "mm", "einsum")
