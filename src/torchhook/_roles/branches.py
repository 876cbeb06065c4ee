"""Inside a block: the sums by which branches join the stream, and what each branch is.

From the block's output one goes back, through sums and through norms that stand on the stream, until the block's input
is reached. What else went into each sum is a branch; one in which attention is called is attention's.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from torchhook._recording.address import Site
from torchhook._roles.chain import Block
from torchhook._roles.trace import Node, Token, Trace

ADDS = frozenset({"add", "add_", "iadd", "radd"})
FUSED = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention"})
# They change how a tensor is looked at, not what is in it.
VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "to"}
    | {"type_as", "float", "expand", "swapaxes", "movedim", "view_as", "reshape_as", "clone", "type", "t"}
)
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack"})
CONTRACTIONS = frozenset(
    {"linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "grouped_mm", "_grouped_mm"}
    | {"grouped_mm_fallback"}  # that of transformers, where torch has no grouped product
)


@dataclasses.dataclass(slots=True)
class Branch:
    """What is added to the stream: the tensor, the sum that takes it, and the calls that made it from the stream."""

    token: Token
    sum: Node
    calls: list[Node]
    reads: set[Token]
    """The values of the stream that it was made from."""
    attends: Node | None
    """The attention call inside, if there is one."""
    given: set[Token] = dataclasses.field(default_factory=set)
    """What else it was made from that was there before the block, parameters aside."""

    @property
    def contractions(self) -> int:
        return sum(1 for node in self.calls if node.name in CONTRACTIONS)


@dataclasses.dataclass(slots=True)
class Step:
    """One sum on the stream: what it was before, the branches that join, and what it is then."""

    before: Token
    branches: list[Branch]
    sum: Node
    norm: Node | None
    """The norm that the sum goes through before the stream goes on (post-norm)."""
    after: Token


class Reader:
    """Reads one block of a trace."""

    def __init__(self, trace: Trace, block: Block) -> None:
        self.trace = trace
        self.block = block
        self.stream: set[Token] = set()
        """What the stream is from the block's input to its output."""
        self._ends = (block.node.start, block.node.end)
        self._handed = {*trace.nodes[-1].taken(), *block.node.taken()}

    def steps(self) -> list[Step] | None:
        """The sums from the block's input to its output, or ``None`` where the way is not made of sums alone."""
        bare = self._path(self.block.made[1], self.block.node.end, 0)
        if bare is None:
            return None
        stream = {self.root(self.block.taken[1]), *(self.root(step.after) for step in bare)}
        stream |= {self.root(step.sum.made()[0]) for step in bare}
        self.stream = stream
        given = {self.root(token) for token in self.block.node.taken()}
        for step in bare:
            (branch,) = step.branches
            # The stream may be kept in two parts, which the next block adds up: then neither is the stream.
            if self.root(branch.token) in given:
                return None
            whole = self.branch(branch.token, step.sum)
            step.branches = (self._parts(whole) if len(bare) == 1 else None) or [whole]
        return bare

    def _path(self, token: Token, before: int, depth: int) -> list[Step] | None:
        """The steps from the block's input to a tensor."""
        if self.root(token) == self.root(self.block.taken[1]):
            return []
        if depth > 40:
            return None
        norm = self._norm(token, before)
        if norm is not None:
            steps = self._path(norm.taken()[0], norm.start, depth + 1)
            # A norm on the block's input is the beginning of a branch, not of a stream.
            if steps and steps[-1].norm is None:
                steps[-1].norm, steps[-1].after = norm, token
                return steps
            return None
        origin = self.trace.origin(self.root(token), before)
        if origin is None or origin.name not in ADDS or not self._inside(origin):
            return None
        operands = self.operands(origin)
        if operands is None:
            return None
        for stream, branch in (operands, operands[::-1]):
            steps = self._path(stream, origin.start, depth + 1)
            if steps is not None:
                placeholder = Branch(branch, origin, [], set(), None)
                # The sum itself and not a view of it, which may have another shape.
                after = token if depth == 0 else origin.made()[0]
                return [*steps, Step(stream, [placeholder], origin, None, after)]
        return None

    def operands(self, node: Node) -> tuple[Token, Token] | None:
        """The two tensors of one shape that a call adds up."""
        tokens = node.taken()
        if len(tokens) != 2 or any(t not in self.trace.floating for t in tokens):
            return None
        alike = self.trace.shapes[tokens[0]] == self.trace.shapes[tokens[1]]
        return (tokens[0], tokens[1]) if alike else None

    def _norm(self, token: Token, before: int) -> Node | None:
        """The norm whose output a tensor is: a module without matrices, of one tensor."""
        for node in reversed(self.trace.makers.get(token, [])):
            if node.op is None and node.end < before and self._inside(node) and is_norm(self.trace, node):
                return node
        return None

    def _inside(self, node: Node) -> bool:
        return self._ends[0] < node.start and node.end < self._ends[1]

    def root(self, token: Token, before: int | None = None) -> Token:
        """The tensor of which another one is only a view."""
        return seen_as(self.trace, token, before)

    def branch(self, token: Token, sum_: Node) -> Branch:
        """All calls that a tensor was made by, back to the stream."""
        calls: dict[int, Node] = {}
        reads: set[Token] = set()
        given: set[Token] = set()
        waiting, seen = [(token, sum_.start)], set[tuple[Token, int]]()
        while waiting:
            current, before = waiting.pop()
            root = self.root(current, before)
            # Both: a view of the stream is the stream, and its root may be made before the block.
            if root in self.stream or current in self.stream:
                reads.add(root if root in self.stream else current)
                continue
            origin = self.trace.origin(current, before)
            if origin is None or not self._inside(origin):
                given |= {current} if origin is not None or current in self._handed else set()
                continue
            # By both: what is written in place is the same tensor before and after.
            if (current, origin.end) in seen:
                continue
            seen.add((current, origin.end))
            calls[id(origin)] = origin
            waiting += [(t, origin.start) for t in origin.taken()]
        ordered = sorted(calls.values(), key=lambda node: node.end)
        return Branch(token, sum_, ordered, reads, next((n for n in ordered if attends(self.trace, n)), None), given)

    def _parts(self, whole: Branch) -> list[Branch] | None:
        """Attention and the rest, where a block adds both up before they join the stream."""
        origin = self.trace.origin(self.root(whole.token), whole.sum.start)
        if origin is None or origin.name not in ADDS or whole.attends is None:
            return None
        operands = self.operands(origin)
        if operands is None:
            return None
        parts = [self.branch(token, origin) for token in operands]
        if sum(part.attends is not None for part in parts) != 1:
            return None
        rest = next(part for part in parts if part.attends is None)
        # A gate or a convolution beside attention is no feed-forward part: that takes two products at least.
        return parts if rest.contractions >= 2 else None


def descends(trace: Trace, token: Token, before: int, from_: Node) -> bool:
    """Whether a tensor was made from what another call made."""
    return comes_from(trace, token, before, set(from_.made()), from_.start)


def comes_from(trace: Trace, token: Token, before: int, sources: set[Token], since: int = -1) -> bool:
    """Whether a tensor is one of some others, or was made from one; what was made before ``since`` was not."""
    waiting, seen = [(token, before)], set[tuple[Token, int]]()
    while waiting:
        current, end = waiting.pop()
        if current in sources:
            return True
        origin = trace.origin(current, end)
        if origin is None or (current, origin.end) in seen or origin.end < since:
            continue
        seen.add((current, origin.end))
        waiting += [(t, origin.start) for t in origin.taken()]
    return False


def mixes_more(reader: Reader, branch: Branch) -> bool:
    """Whether something is added to what attention makes that is made without it, as the state space beside it."""
    attention = branch.attends
    assert attention is not None
    for node in branch.calls:
        if node.start <= attention.end or node.name not in ADDS | _JOINS:
            continue
        operands = reader.operands(node) if node.name in ADDS else node.taken()
        parts = [reader.branch(token, node) for token in operands or ()]
        alone = [part for part in parts if part.attends is None and part.contractions and part.reads]
        if alone and any(part.attends is not None for part in parts):
            return True
    return False


def goes_on(branch: Branch) -> bool:
    """Whether more comes after attention than its output projection: a feed-forward part, a state space.

    Products are counted from the one with the values on; those with nothing but views between them are one.
    """
    attention = branch.attends
    assert attention is not None
    state = dict.fromkeys(attention.made(), (1 if attention.name in FUSED else 0, False))
    for node in branch.calls:
        taken = [state[token] for token in node.taken() if token in state]
        if not taken or node.start < attention.end:
            continue
        count, between = max(taken)
        if node.name in CONTRACTIONS:
            count, between = count + (between or not count), False
        elif node.name not in VIEWS | ADDS and not node.name.startswith("dropout"):
            between = True
        state |= {token: max(state.get(token, (0, False)), (count, between)) for token in node.made()}
    # One more than the projection may be: where a gate, a norm or the choice of experts stands before it.
    return max(count for count, _ in state.values()) > 2


def seen_as(trace: Trace, token: Token, before: int | None = None) -> Token:
    """The tensor of which another one is only a view."""
    for _ in range(40):
        origin = trace.origin(token, before)
        if origin is None or origin.name not in VIEWS or not origin.inputs:
            return token
        token = origin.inputs[0][1]
    return token


def is_norm(trace: Trace, node: Node) -> bool:
    """Whether a module may be a norm: one tensor in, one of the same shape out, and no matrices."""
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.taken() == node.made():
        return False
    if trace.shapes[node.taken()[0]] != trace.shapes[node.made()[0]] or isinstance(node.module, nn.Dropout):
        return False
    return all(parameter.dim() <= 1 for parameter in node.module.parameters())


def attends(trace: Trace, node: Node) -> bool:
    """Whether a call is attention's: fused, or a softmax over scores of 3 dims or more."""
    if node.name in FUSED:
        return True
    if node.name not in ("softmax", "_softmax") or not node.outputs:
        return False
    shape = trace.shapes[node.made()[0]]
    if len(shape) < 3:
        return False
    named = any(word in type(node.module).__name__.lower() for word in ("attention", "attn"))
    return len(shape) >= 4 or named


def site_of(trace: Trace, token: Token, before: int) -> Site | None:
    """Where a tensor is read and changed, before it is used: the last module that returns it, else the operation.

    A dropout that is only an operation comes after them in training mode, so that it is the place where there is one.
    """
    makers = [node for node in trace.makers.get(token, ()) if node.end <= before]
    drops = [node.end for node in makers if node.random]
    makers = [node for node in makers if trace.once(node)]
    # Any other module that hands on what it takes (an identity) may stand on a branch, beside the value's own way.
    makers = [
        n for n in makers if n.op is not None or token not in n.taken() or any(n.start < e <= n.end for e in drops)
    ]
    makers = [node for node in makers if node.end >= max(drops, default=-1)]
    modules = [(node, leaf) for node in makers if node.op is None for leaf, t in node.outputs if t == token]
    plain = [node for node, leaf in modules if not leaf]
    if plain:
        return plain[-1].site()
    if modules:
        return modules[-1][0].site(leaf=modules[-1][1])
    ops = [node for node in makers if node.op is not None and node.outputs[0][0] == ""]
    # The first: a cast to the same type, or a dropout that drops nothing, says less than what made it.
    return ops[0].site() if ops else None


def added(trace: Trace, branch: Branch) -> Site | None:
    """Where a branch is what it adds: made by a module or an operation, else taken by the sum.

    The latter where one module drops branches for several sums, so that its address stands for all of them.
    """
    site = site_of(trace, branch.token, branch.sum.start)
    if site is None and any(node.random for node in trace.makers.get(branch.token, ())):
        leaf = next((leaf for leaf, token in branch.sum.inputs if token == branch.token), None)
        return None if leaf is None else branch.sum.site("input", leaf)
    return site


def first_use(trace: Trace, token: Token, after: int = -1) -> int:
    """When an operation first makes something of a tensor, once it is there."""
    made = max([after, *(n.end for n in trace.makers.get(token, [])[:1])])
    # A dropout in eval mode hands on what it takes: that is no use yet.
    uses = (n.start for n in trace.takers.get(token, ()) if n.op is not None and token not in n.made())
    written = (n.start for n in trace.takers.get(token, ()) if n.op is not None and n.name.endswith("_"))
    return min((start for start in (*uses, *written) if start > made), default=trace.nodes[-1].end)
