"""Where the outputs of experts are weighed by scores and summed, and whether anything comes after that.

A matrix behind the sum cannot be told from one in every expert by any number, so that it is told by the calls.
"""

from __future__ import annotations

import math

from torchhook._roles.branches import ADDS, CONTRACTIONS, VIEWS, Branch, Reader, comes_from, descends
from torchhook._roles.trace import Node, Token, Trace

_SUMS = frozenset({"sum", "index_add", "index_add_", "scatter_add", "scatter_add_"})
# They lay out what is there, by rows of tokens or experts.
_PLACES = VIEWS | frozenset(
    {"getitem", "setitem", "index_select", "index_put", "index_put_", "index_copy_", "gather", "scatter", "scatter_"}
    | {"cat", "stack", "split", "chunk", "unbind", "copy_", "masked_fill", "masked_fill_", "where", "repeat", "half"}
    | {"bfloat16", "expand_as", "movedim", "__getitem__", "__setitem__", "__get__"}
)
_PRODUCTS = frozenset({"mul", "mul_", "imul", "rmul"})


class Weighed:
    """The calls of a branch in which what is made from the stream is weighed by the scores of a choice."""

    def __init__(self, reader: Reader, branch: Branch, choice: Node) -> None:
        self._reader, self._trace, self._branch, self._choice = reader, reader.trace, branch, choice
        self._scores = self._chosen_from()
        self._made: set[Token] = set()
        self.meetings: dict[int, bool] = {}
        """Calls that weigh, by id, and whether what experts made; else it is what goes into them."""
        for node in branch.calls:
            weighs = self._weighs(node) if node.start > choice.end else None
            if weighs is not None:
                self.meetings[id(node)] = weighs
                self._made.update(node.made() if weighs else ())

    def more(self, token: Token, before: int) -> Node | None:
        """A call that does more to what is weighed than to lay it out and sum it up, on the way to a tensor."""
        waiting, seen = [(token, before, False)], set[tuple[int, bool]]()
        while waiting:
            current, end, summed = waiting.pop()
            origin = self._trace.origin(current, end)
            if origin is None or not descends(self._trace, current, end, self._choice):
                continue
            if (origin.end, summed) in seen or id(origin) in self.meetings:
                continue
            seen.add((origin.end, summed))
            routed = [t for t in origin.taken() if t in self._trace.floating]
            if origin.name in CONTRACTIONS:
                if summed and self._for_each(origin) and self._into_experts(origin):
                    continue
                return origin
            adds = origin.name in ADDS | _SUMS
            scales = origin.name in _PRODUCTS | {"div", "truediv"} and len(origin.inputs) == 1
            if not (adds or scales or origin.name in _PLACES or origin.name.startswith("dropout")):
                return origin
            if adds and self._is_residual(origin):
                return origin
            waiting += [(t, origin.start, summed or adds) for t in routed]
        return None

    def _chosen_from(self) -> set[Token]:
        """The scores that are chosen from, and what they are made from while there is one for each expert."""
        count, found = self._trace.shapes[self._choice.inputs[0][1]][-1], set(self._choice.made()[:1])
        waiting = [(self._choice.inputs[0][1], self._choice.start)]
        while waiting:
            token, before = waiting.pop()
            origin = self._trace.origin(token, before)
            if token in found or token not in self._trace.floating:
                continue
            if self._trace.shapes[token][-1:] == (count,) or (origin is not None and origin.name in CONTRACTIONS):
                found.add(token)
            if origin is not None and origin.name not in CONTRACTIONS and token in found:
                waiting += [(t, origin.start) for t in origin.taken()]
        return found

    def _weighs(self, node: Node) -> bool | None:
        """Whether a call takes scores of what was chosen, and vectors of experts for them, or vectors for experts."""
        if node.name not in _PRODUCTS | CONTRACTIONS:
            return None
        taken = [token for token in node.taken() if token in self._trace.floating]
        weights = [token for token in taken if self._is_weight(token, node)]
        vectors = [token for token in taken if token not in weights]
        size = max(map(self._size, weights), default=0)
        # What was weighed before is no expert's any more.
        if any(comes_from(self._trace, token, node.start, self._made, self._choice.start) for token in vectors):
            return None
        made = [self._made_by(token, node) for token in vectors if weights and self._size(token) > size]
        if any(made):
            return True
        later = (call for call in self._branch.calls if call.name in CONTRACTIONS and call.start > node.end)
        into = 0 in made and any(
            self._for_each(call) and descends(self._trace, call.taken()[0], call.start, node) for call in later
        )
        return False if into else None

    def _made_by(self, token: Token, taker: Node) -> int | None:
        """How many products made a tensor from the stream, by its numbers alone; ``None`` where it is not made so."""
        found, products, reads = set[int](), 0, False
        waiting = [(token, taker.start)]
        while waiting:
            current, before = waiting.pop()
            if {current, self._reader.root(current, before)} & self._reader.stream:
                reads = True
                continue
            origin = self._trace.origin(current, before)
            if current in self._scores or origin is None or origin.end in found:
                continue
            if origin.end < self._reader.block.node.start:
                continue
            found.add(origin.end)
            products += origin.name in CONTRACTIONS
            waiting += [(t, origin.start) for t in origin.taken() if t in self._trace.floating]
        return products if reads else None

    def _is_weight(self, token: Token, taker: Node) -> bool:
        """Whether numbers are those of scores, and not what products made of them; some are chosen among them."""
        if not descends(self._trace, token, taker.start, self._choice):
            return False
        waiting, seen, found = [(token, taker.start)], set[int](), False
        while waiting:
            current, before = waiting.pop()
            if current in self._scores:
                found = True
                continue
            origin = self._trace.origin(current, before)
            if {current, self._reader.root(current, before)} & self._reader.stream:
                return False
            if origin is None or origin.end in seen or origin.end < self._reader.block.node.start:
                continue
            seen.add(origin.end)
            if origin.name in CONTRACTIONS:
                return False
            waiting += [(t, origin.start) for t in origin.taken() if t in self._trace.floating]
        return found

    def _into_experts(self, node: Node) -> bool:
        """Whether scores weigh what goes into a product, and nothing was summed up since."""
        waiting, seen, found = [(t, node.start) for t in node.taken()], set[int](), False
        while waiting:
            origin = self._trace.origin(*waiting.pop())
            if origin is None or origin.end in seen or origin.end < self._choice.start:
                continue
            seen.add(origin.end)
            if self.meetings.get(id(origin), False) or origin.name in _SUMS:
                return False
            found = found or id(origin) in self.meetings
            if id(origin) not in self.meetings:
                waiting += [(t, origin.start) for t in origin.taken() if t in self._trace.floating]
        return found

    def _for_each(self, node: Node) -> bool:
        """Whether a product has a matrix for each expert."""
        count = self._trace.shapes[self._choice.inputs[0][1]][-1]
        shapes = [self._trace.shapes[t] for t in node.taken() if self._trace.origin(t, node.start) is None]
        return any(len(shape) > 2 and shape[0] == count for shape in shapes)

    def _is_residual(self, node: Node) -> bool:
        """Whether one of the parts of a sum is made from another."""
        taken = [token for token in node.taken() if token in self._trace.floating]
        return any(
            one != other and comes_from(self._trace, one, node.start, {other}, self._choice.start)
            for one in taken
            for other in taken
        )

    def _size(self, token: Token) -> int:
        return math.prod(self._trace.shapes[token])


def precedes(trace: Trace, one: Node, choice: Node) -> bool:
    """Whether a choice is among what another one chose, of groups of experts say: no product lies between them."""
    waiting, seen = [(token, choice.start) for token in choice.taken()], set[int]()
    while waiting:
        origin = trace.origin(*waiting.pop())
        if origin is None or origin.end in seen or origin.end < one.start or origin.name in CONTRACTIONS:
            continue
        if origin is one:
            return True
        seen.add(origin.end)
        waiting += [(token, origin.start) for token in origin.taken()]
    return False
