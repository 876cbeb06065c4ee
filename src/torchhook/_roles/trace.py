"""What flowed where in one pass: every call of a module or operation, with the tensors that went in and came out.

Tensors are told apart by identity and never by value, so that nothing is taken for something else that happens to be
equal (two fresh norms give the same, a projection that starts at zero gives what any other does). None is kept alive.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook import _torch
from torchhook._core import calling
from torchhook._core.functional import Listener
from torchhook._core.index import is_callable
from torchhook._core.scope import Scope
from torchhook._core.session import Session
from torchhook._core.taps import Look, as_value
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook._values.tree import Inputs

Token = int
"""Stands for one tensor of the pass."""


@dataclasses.dataclass(slots=True)
class Node:
    """One call: of a module, or of an operation inside it."""

    path: str
    module: nn.Module
    op: str | None
    """The name of the operation and, in brackets, its place among its like in this call of the module."""
    start: int
    end: int = -1
    inputs: list[tuple[str, Token]] = dataclasses.field(default_factory=list)
    outputs: list[tuple[str, Token]] = dataclasses.field(default_factory=list)
    start_of: int = -1
    """Of an operation, when the call of the module began in which it ran."""
    random: float = 0.0
    """The probability with which a dropout would drop, were the model in training mode; 1 where it is not known."""

    @property
    def name(self) -> str:
        """The operation without its place."""
        return "" if self.op is None else self.op.partition("(")[0]

    def taken(self) -> list[Token]:
        return [token for _, token in self.inputs]

    def made(self) -> list[Token]:
        return [token for _, token in self.outputs]

    def site(self, port: str = "output", leaf: str = "") -> Site:
        return Site(self.path, self.op, port=port, leaf=leaf)


@dataclasses.dataclass(slots=True)
class Trace:
    """One pass: calls in the order in which they ended, and what is known of every tensor."""

    nodes: list[Node]
    shapes: dict[Token, tuple[int, ...]]
    floating: set[Token]
    integers: set[Token]
    runs: Counter[int]
    """How often each module ran, by id."""
    makers: dict[Token, list[Node]] = dataclasses.field(default_factory=dict)
    """Calls that returned a tensor, in the order in which they ended."""
    takers: dict[Token, list[Node]] = dataclasses.field(default_factory=dict)
    """Calls that took it."""

    def __post_init__(self) -> None:
        counts = Counter((node.start_of, node.name) for node in self.nodes if node.op is not None)
        for node in self.nodes:
            if node.op is not None and counts[node.start_of, node.name] == 1:
                node.op = node.name  # the only one of its kind needs no number
        for node in self.nodes:
            for token in dict.fromkeys(node.made()):
                self.makers.setdefault(token, []).append(node)
            for token in dict.fromkeys(node.taken()):
                self.takers.setdefault(token, []).append(node)

    def modules(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.op is None)

    def once(self, node: Node) -> bool:
        """Whether its module ran once in the pass: else its address would stand for several values."""
        return self.runs[id(node.module)] == 1

    def origin(self, token: Token, before: int | None = None) -> Node | None:
        """The operation that made a tensor what it is, before the end of another call."""
        made = [n for n in self.makers.get(token, ()) if n.op is not None and (before is None or n.end < before)]
        # What hands its input on unchanged (a dropout in eval mode, a cast to the same type) makes nothing.
        new = [node for node in made if token not in node.taken() or node.name.endswith("_")]
        return new[-1] if new else None


class _Tokens:
    """Numbers for tensors, valid for as long as each lives: an id alone would be used again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Token]] = {}
        self._next = itertools.count()
        self.shapes: dict[Token, tuple[int, ...]] = {}
        self.floating: set[Token] = set()
        self.integers: set[Token] = set()

    def of(self, tensor: Tensor) -> Token:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        token = next(self._next)
        self._known[id(tensor)] = weakref.ref(tensor), token
        with _torch.unheard():  # in torch 2.6, a causal bias tells a mode not even its shape
            self.shapes[token] = tuple(tensor.shape)
            if tensor.is_floating_point():
                self.floating.add(token)
            elif tensor.dtype in (torch.int64, torch.int32):
                self.integers.add(token)
        return token

    def inside(self, value: Any) -> list[tuple[str, Token]]:
        return [(leaf, self.of(part)) for leaf, part in tree.leaves(value) if isinstance(part, Tensor)]


class _Recorder(Listener):
    """Writes down every operation; modules tell it when they begin and end."""

    def __init__(self, scope: Scope | None, paths: dict[int, str]) -> None:
        super().__init__(scope)
        self.tokens = _Tokens()
        self.nodes: list[Node] = []
        self.runs: Counter[int] = Counter()
        self._paths = paths
        self._clock = itertools.count()
        self._open: list[tuple[Node, Counter[str]]] = []
        self._begun: list[tuple[int, list[tuple[str, Token]]]] = []

    def entering(self, module: nn.Module) -> Look:
        return lambda value, call: self.begins(module, value)

    def leaving(self, module: nn.Module) -> Look:
        return lambda value, call: self.ends(module, value)

    def begins(self, module: nn.Module, value: Any) -> None:
        node = Node(self._paths[id(module)], module, None, next(self._clock), inputs=self.tokens.inside(value))
        self.runs[id(module)] += 1
        self._open.append((node, Counter()))

    def ends(self, module: nn.Module, value: Any) -> None:
        while self._open:
            node, _ = self._open.pop()
            if node.module is module:
                node.end, node.outputs = next(self._clock), self.tokens.inside(value)
                self.nodes.append(node)
                return

    def before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Now: an operation in place changes what it takes.
        self._begun.append((next(self._clock), self.tokens.inside(as_value(args, kwargs))))
        return args, kwargs

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().after(name, module, output, args, kwargs)
        start, taken = self._begun.pop()
        around, counts = next(pair for pair in reversed(self._open) if pair[0].module is module)
        number, counts[name] = counts[name], counts[name] + 1
        made = self.tokens.inside(output)
        if made:
            node = Node(self._paths[id(module)], module, f"{name}({number})", start, next(self._clock), taken, made)
            node.start_of = around.start
            if name.startswith(("dropout", "feature_dropout", "alpha_dropout")):
                node.random = _probability(args, kwargs)
            self.nodes.append(node)
        return output


def _probability(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return float(p) if isinstance(p, (int, float)) else 0.5


def _randomness(module: nn.Module, shape: tuple[int, ...]) -> float:
    """Whether a module that hands on what it takes would make something else of it in training mode (drop path)."""
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return 0.0
    given = torch.ones(shape)
    try:
        with calling.in_mode(module, training=True):
            made = module(given)
    except Exception:  # it takes something else
        return 0.0
    return float(isinstance(made, Tensor) and (made.shape != shape or not torch.equal(made, torch.ones(shape))))


def traced(model: nn.Module, inputs: Inputs) -> Trace:
    """Run the model once and write down what flowed where."""
    session = Session(model, warn=False)
    index = session.index
    paths = {key: index.names(module)[0] for key, module in index.distinct.items()}
    recorder = _Recorder(session.scope, paths)
    session.listen(recorder)
    for key, module in index.distinct.items():
        if is_callable(module):
            site = Site(paths[key])
            session.look(Target(site.but(port="input"), module), recorder.entering(module))
            session.look(Target(site, module), recorder.leaving(module))
    with session:
        calling.call(model, inputs)
    tokens = recorder.tokens
    for node in recorder.nodes:
        if node.op is None and node.taken() == node.made():
            node.random = _randomness(node.module, tokens.shapes[node.made()[0]])
    return Trace(recorder.nodes, tokens.shapes, tokens.floating, tokens.integers, recorder.runs)
