"""Around the blocks: the embedding of tokens, the norm after the last block, the logits."""

from __future__ import annotations

import dataclasses

from torchhook._recording.address import Site
from torchhook._roles.branches import is_norm, seen_as, site_of
from torchhook._roles.chain import Chain
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
    waiting, seen, made = [(first.taken[1], first.node.start)], set[tuple[int, int]](), set(node.made())
    while waiting:
        token, before = waiting.pop()
        if token in made:
            return True
        origin = trace.origin(token, before)
        if origin is not None and (token, origin.end) not in seen:
            seen.add((token, origin.end))
            waiting += [(t, origin.start) for t in origin.taken()]
    return False


def _rows(trace: Trace, node: Node) -> int:
    return max((trace.shapes[t][0] for t in node.taken() if t in trace.floating), default=0)


def final_norm(trace: Trace, chain: Chain, found: Ends) -> None:
    """The norm that what the last block returned goes into."""
    last = chain.blocks[-1]
    after = [n for n in trace.modules() if n.start > last.node.end and is_norm(trace, n) and last.made[1] in n.taken()]
    if len(after) == 1 and trace.once(after[0]):
        found.sites["norm_final"], found.norm = after[0].site(), after[0]
    elif after:
        several = f"{len(after)} norms take" if len(after) > 1 else f"{after[0].path!r} runs more than once, and takes"
        found.refused["norm_final"] = f"{several} what the last block returns."
    else:
        found.refused["norm_final"] = "no module without matrices takes what the last block returns."


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
