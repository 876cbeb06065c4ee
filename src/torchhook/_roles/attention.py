"""What attention takes and makes: queries, keys, values, the pattern, and what goes into the output projection."""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from torchhook._recording.address import Site
from torchhook._roles.branches import CONTRACTIONS, FUSED, VIEWS, Branch, Reader, comes_from, is_norm
from torchhook._roles.chain import Chain
from torchhook._roles.trace import Node, Token, Trace

_PRODUCTS = frozenset({"matmul", "bmm"})
# From scores to the softmax, and from there to the product with the values.
_BETWEEN = frozenset(
    {"add", "add_", "iadd", "mul", "mul_", "div", "truediv", "masked_fill", "where", "tanh", "max", "maximum", "clamp"}
)


@dataclasses.dataclass(slots=True)
class Attention:
    """The sites of one attention call; what is not there stands in ``refused`` with what was tried."""

    sites: dict[str, Site] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    call: Site | None = None
    """The fused call, or the product of pattern and values."""
    projection: Node | None = None
    after: list[Node] = dataclasses.field(default_factory=list)
    """Norms between the projection and the stream."""
    scaled: bool = False
    """Whether a factor stands between them too."""
    scores: Site | None = None
    """The product of queries and keys, where it is not fused."""


def read(reader: Reader, branch: Branch) -> Attention:
    """The parts of a branch in which attention is called."""
    node, found = branch.attends, Attention()
    assert node is not None
    _projection(reader, branch, found)
    several = sum(1 for n in branch.calls if n.name == node.name) > 1
    if several:
        found.refused |= dict.fromkeys("qkv", f"{node.name} is called more than once in the branch, so which is meant?")
        found.refused["pattern"] = found.refused["q"]
    elif node.name == "scaled_dot_product_attention":
        _fused(node, found)
    elif node.name in FUSED:
        why = f"{node.path}/{node.name} projects and attends in one call, in which they are not to be seen."
        found.refused |= dict.fromkeys(("q", "k", "v", "pattern"), why)
    else:
        _eager(reader, branch, node, found)
    return found


def _fused(node: Node, found: Attention) -> None:
    leaves = dict(
        zip("qkv", (("args.0", "kwargs.query"), ("args.1", "kwargs.key"), ("args.2", "kwargs.value")), strict=True)
    )
    there = {leaf for leaf, _ in node.inputs}
    for name, options in leaves.items():
        leaf = next((option for option in options if option in there), None)
        if leaf is None:
            found.refused[name] = f"{node.path}/{node.name} takes no {options[1].removeprefix('kwargs.')}."
        else:
            found.sites[name] = node.site("input", leaf)
    found.call = node.site()
    found.refused["pattern"] = (
        f"{node.path}/{node.name} is a fused kernel, which never makes it: load the model with "
        "attn_implementation='eager', or take th.attention(model, inputs)."
    )


def _eager(reader: Reader, branch: Branch, node: Node, found: Attention) -> None:
    trace = reader.trace
    after = _taken_by(trace, branch, node.made()[0])
    if after is None or after.name not in _PRODUCTS:
        why = f"the result of {node.path}/{node.name} does not go into a product with the values"
        why = f"{why}, but {'nowhere' if after is None else f'into {after.name}'}."
        found.refused |= dict.fromkeys(("q", "k", "v", "pattern"), why)
        return
    found.call = after.site()
    found.sites["pattern"] = node.site()
    found.sites["v"] = after.site("input", "args.1")
    scores = _scores(reader, node)
    if scores is None:
        found.refused |= dict.fromkeys("qk", f"what {node.path}/{node.name} takes is not made by one product.")
        return
    found.scores = scores.site()
    found.sites["q"] = scores.site("input", "args.0")
    turned = trace.origin(scores.inputs[1][1], scores.start)
    if turned is None or turned.name not in ("transpose", "swapaxes", "mT", "permute") or not turned.inputs:
        found.refused["k"] = f"the keys in {scores.path}/{scores.name} are not turned by an operation of their own."
    else:
        found.sites["k"] = turned.site("input", turned.inputs[0][0])


def crosses(reader: Reader, branch: Branch, chain: Chain) -> bool | None:
    """Whether attention looks at something else than the stream: its values are made from what the block is given.

    ``None`` where it is neither: they are parameters, or what an earlier block made of the same stream.
    """
    found = values(reader, branch)
    if found is None:
        return None
    part = reader.branch(found[1], found[0])
    if part.reads:
        return False
    stream = {token for block in chain.blocks for _, token in (block.taken, block.made)}
    own = any(comes_from(reader.trace, token, found[0].start, stream) for token in part.given)
    return None if own or not part.given else True


def values(reader: Reader, branch: Branch) -> tuple[Node, Token] | None:
    """The call that takes the values of attention, and these.

    Of a softmax, that is the first product of what is made from it with what is no parameter: it may be masked, scaled,
    or mixed among heads before.
    """
    node = branch.attends
    assert node is not None
    if node.name in FUSED:
        found = [token for leaf, token in node.inputs if leaf in ("args.2", "kwargs.value")]
        return (node, found[0]) if found else None
    made = set(node.made())
    for call in branch.calls:
        taken = set(call.taken())
        if call.start < node.end or not made & taken:
            continue
        others = [token for token in taken - made if token in reader.trace.floating]
        parts = [reader.branch(token, call) for token in others] if call.name in CONTRACTIONS else []
        found = [part.token for part in parts if part.reads or part.given]
        if found:
            return (call, found[0]) if len(found) == 1 else None
        made.update(call.made())
    return None


def _taken_by(trace: Trace, branch: Branch, token: Token) -> Node | None:
    """The next call that does more with a tensor than to look at it otherwise, or to drop parts of it."""
    calls = {id(node) for node in branch.calls}
    for _ in range(8):
        nexts = [n for n in trace.takers.get(token, ()) if n.op is not None and id(n) in calls]
        if not nexts:
            return None
        if nexts[0].name not in VIEWS and not nexts[0].name.startswith("dropout"):
            return nexts[0]
        token = nexts[0].made()[0]
    return None


def _scores(reader: Reader, node: Node) -> Node | None:
    """The product of queries and keys that a softmax is taken of."""
    token, before = node.inputs[0][1], node.start
    for _ in range(8):
        origin = reader.trace.origin(reader.root(token, before), before)
        if origin is None or not origin.inputs:
            return None
        if origin.name in _PRODUCTS:
            return origin if origin.inputs[0][0] == "args.0" and len(origin.inputs) == 2 else None
        if origin.name not in _BETWEEN:
            return None
        # Not always the first: where(mask, scores, -inf).
        same = [t for t in origin.taken() if t in reader.trace.floating and _scored(reader.trace, t, node)]
        if not same:
            return None
        token, before = same[0], origin.start
    return None


def _scored(trace: Trace, token: Token, softmax: Node) -> bool:
    """Whether a tensor may hold the scores: it is as large as the pattern."""
    return math.prod(trace.shapes[token]) == math.prod(trace.shapes[softmax.made()[0]])


def _projection(reader: Reader, branch: Branch, found: Attention) -> None:
    """The module whose output is the branch, norms aside; what goes into it is ``z``."""
    trace, token = reader.trace, branch.token
    for _ in range(8):
        modules = [n for n in trace.makers.get(token, ()) if n.op is None and n.end < branch.sum.start]
        norm = next((n for n in modules if is_norm(trace, n)), None)
        matrix = next((n for n in modules if _is_projection(n)), None)
        if matrix is not None and trace.once(matrix):
            found.projection = matrix
            found.sites["z"] = matrix.site("input")
            return
        if norm is not None and trace.once(norm):
            found.after.insert(0, norm)
            token = norm.taken()[0]
            continue
        origin = trace.origin(token, branch.sum.start)
        factor = origin is not None and origin.name in ("mul", "mul_", "div") and len(origin.inputs) == 1
        if origin is None or not (factor or origin.name in VIEWS):
            break
        found.scaled = found.scaled or factor
        token = origin.inputs[0][1]
    found.refused["z"] = "no module with a matrix returns what attention adds to the stream, so no output projection."


def _is_projection(node: Node) -> bool:
    """A module that multiplies by a matrix of its own and does nothing else."""
    own = dict(node.module.named_parameters(recurse=False))
    alone = next(node.module.children(), None) is None
    weight = own.get("weight")
    return alone and isinstance(weight, nn.Parameter) and weight.dim() == 2 and len(node.inputs) == 1
