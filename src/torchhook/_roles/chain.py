"""The stacks of blocks of a model: numbered modules of which each takes what the one before it returned."""

from __future__ import annotations

import dataclasses
import itertools

from torchhook._roles.trace import Node, Token, Trace


@dataclasses.dataclass(slots=True)
class Block:
    """One member of a stack: its call, and where the stream goes in and comes out."""

    node: Node
    taken: tuple[str, Token]
    """The leaf of its input that is the stream, and the tensor."""
    made: tuple[str, Token]
    """The same of its output."""


@dataclasses.dataclass(slots=True)
class Chain:
    """A stack of blocks."""

    path: str
    """What the paths of its blocks have in common, before their numbers."""
    blocks: list[Block]
    prefix: str = ""
    """What its names begin with, where a model has several."""


def chains(trace: Trace) -> list[Chain]:
    """Every stack of a model that is not inside of another, in the order in which they ran."""
    groups: dict[str, list[Node]] = {}
    for node in trace.modules():
        stem, number = _numbered(node.path)
        if number:
            groups.setdefault(stem, []).append(node)
    found = [chain for path, nodes in groups.items() if (chain := _linked(trace, path, nodes)) is not None]
    # A stack of one is only taken for one where nothing longer is: most lists of one hold something else.
    longest = [chain for chain in found if len(chain.blocks) > 1] or found
    outer = [c for c in longest if not any(c is not o and c.path.startswith(o.path) for o in longest)]
    outer.sort(key=lambda chain: chain.blocks[0].node.start)
    for chain in outer:
        chain.prefix = _prefix(chain.path, [other.path for other in outer if other is not chain])
    return outer


def _numbered(path: str) -> tuple[str, str]:
    """A path without the number at its end, and that number.

    >>> _numbered("model.layers.3"), _numbered("layers.block_3"), _numbered("model.norm")
    (('model.layers.', '3'), ('layers.block_', '3'), ('model.norm', ''))
    """
    stem = path.rstrip("0123456789")
    return stem, path[len(stem) :]


def _linked(trace: Trace, path: str, nodes: list[Node]) -> Chain | None:
    nodes = sorted(nodes, key=lambda node: node.start)
    if [_numbered(node.path)[1] for node in nodes] != [str(i) for i in range(len(nodes))]:
        return None  # some never ran, ran twice, or in another order
    if len(nodes) == 1:
        block = _alone(trace, nodes[0])
        return None if block is None else Chain(path, [block])
    links = [_link(trace, one, other) for one, other in itertools.pairwise(nodes)]
    if any(link is None for link in links):
        return None
    known = [link for link in links if link is not None]
    first = _leaf(nodes[0].inputs, known[0][1][0])
    last = _leaf(nodes[-1].outputs, known[-1][0][0])
    if first is None or last is None:
        return None
    entries = [first, *(taken for _, taken in known)]
    exits = [*(made for made, _ in known), last]
    shapes = {trace.shapes[token] for _, token in (*entries, *exits)}
    if len(shapes) > 1:
        return None
    return Chain(path, [Block(*parts) for parts in zip(nodes, entries, exits, strict=True)])


def _link(trace: Trace, one: Node, other: Node) -> tuple[tuple[str, Token], tuple[str, Token]] | None:
    """What one returned and the other took: the leaf and the tensor at both ends."""
    for made in one.outputs:
        for taken in other.inputs:
            if made[1] == taken[1] and made[1] in trace.floating and len(trace.shapes[made[1]]) > 1:
                return made, taken
    return None


def _leaf(parts: list[tuple[str, Token]], leaf: str) -> tuple[str, Token] | None:
    return next((part for part in parts if part[0] == leaf), None)


def _alone(trace: Trace, node: Node) -> Block | None:
    taken = next((part for part in node.inputs if part[1] in trace.floating), None)
    if taken is None or not trace.once(node):
        return None
    shape = trace.shapes[taken[1]]
    made = next((p for p in node.outputs if trace.shapes[p[1]] == shape and p[1] in trace.floating), None)
    return None if made is None else Block(node, taken, made)


def _prefix(path: str, others: list[str]) -> str:
    """The first part of a path by which it differs from all others, with a dot; nothing, where there are none.

    >>> _prefix("model.encoder.layers", ["model.decoder.layers"])
    'encoder.'
    """
    if not others:
        return ""
    parts = path.rstrip(".").split(".")
    for i in range(len(parts)):
        if not any(other.split(".")[: i + 1] == parts[: i + 1] for other in others):
            return f"{parts[i]}."
    return f"{path.rstrip('.')}."
