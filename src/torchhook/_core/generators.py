"""Which modules of a model are called once for each step of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from torchhook._core.index import Index, Step, unwrapped, within
from torchhook._values.by_identity import ByIdentity

CACHES = ("past_key_values", "cache_params", "past_key_value", "past")
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")

_NEAR = 2  # levels: PEFT holds a model that generates two levels below its own
_FEW = 8  # who wraps a model has few modules of its own: more are layers, and take long to ask

_kind: Callable[[nn.Module], Any] = type  # not as mypy knows it: it takes no class of modules for hashable


def generators(index: Index) -> list[nn.Module]:
    """The modules of a model that are called again and again while something is generated: mostly the model itself.

    Whatever has a ``generate``; and the one that takes tokens and a cache, which a loop of somebody's own may call.
    They are looked for on the ways to what was asked of the index, however deep that lies, and near the top: to go
    through all of a large model would take longer than to open a session on it.
    """
    if len(index.recalled) == 1 and not index.followed:
        return index.recalled[0].generators()
    recalled = [step for known in index.recalled for step in known.steps()]
    return Generators(index.root, [*recalled, *index.followed] if recalled else index.followed).told()


class Generators:
    """Those that were come upon on the ways from a model to some of its modules."""

    def __init__(self, root: nn.Module, steps: Iterable[Step]) -> None:
        self._met: dict[int, nn.Module] = {}
        self._generate: set[int] = set()
        self._take_cache: set[int] = set()
        # What is inside of one that takes a cache is called by that one, unless it generates by itself.
        self._inside: dict[int, bool] = {}
        self.searched: list[nn.Module] = []
        """Those near the top, of which all that they hold was looked at."""
        self.too_large: list[nn.Module] = []
        """Those that hold too much for that."""
        self._near(root)
        for holder, _, child in steps:
            # Most are layers, and hold none; what a wrapper holds was met in its place.
            if (child._modules or _means(_kind(child)) != _NEITHER) and within(holder) is not child:
                self._below(holder, child)

    def _near(self, root: nn.Module) -> None:
        """The model itself, and what it holds if it may be one that wraps another."""
        self._meet(root, False)
        level = [root]
        for _ in range(_NEAR):
            above = [module for module in level if holds_few(module)]
            self.searched += above
            self.too_large += [module for module in level if not holds_few(module)]
            held = [(holder, child) for holder in above for child in holder._modules.values() if child is not None]
            self.searched += [child for _, child in held if within(child) is not child]
            level = [self._below(holder, child) for holder, child in held]
            if len(level) > _FEW:
                break

    def _below(self, holder: nn.Module, module: nn.Module) -> nn.Module:
        """One of those that another holds, without what wraps it."""
        if module._modules:
            module = unwrapped(module)
        self._meet(module, self._inside.get(id(holder), False))
        return module

    def _meet(self, module: nn.Module, inside: bool) -> None:
        generates, takes_cache = _means(_kind(module))
        if generates or takes_cache:
            self._met[id(module)] = module
        if generates:
            self._generate.add(id(module))
        if takes_cache and not inside:
            self._take_cache.add(id(module))
        self._inside[id(module)] = inside or takes_cache

    def told(self) -> list[nn.Module]:
        # Of several, none of which generates, nobody can tell whose calls are the steps.
        chosen = self._generate | self._take_cache if len(self._take_cache) == 1 else self._generate
        return [module for key, module in self._met.items() if key in chosen]


def holds_few(module: nn.Module) -> bool:
    """Whether a module near the top holds so few that it may wrap one of them."""
    return len(module._modules) <= _FEW


_NEITHER = (False, False)
_known: ByIdentity[tuple[bool, bool]] = ByIdentity()
"""By class, and remembered: this is asked whenever a session opens. Not held, for a class may know its model."""


def _means(kind: type[nn.Module]) -> tuple[bool, bool]:
    """Whether modules of a class generate, and whether they take tokens and a cache."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _generates(kind), _takes_cache(kind)
    return found


def _generates(kind: type[nn.Module]) -> bool:
    if not callable(getattr(kind, "generate", None)):
        return False
    can = getattr(kind, "can_generate", None)  # of transformers: some have the method and only refuse
    try:
        return can is None or bool(can())
    except TypeError:  # a method of an instance, of somebody else
        return True


def _takes_cache(kind: type[nn.Module]) -> bool:
    """Whether a model is given tokens and a cache: one without a head, inside of one that generates."""
    forward: Any = getattr(kind, "forward", None)  # TorchScript's cannot be asked for
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    if code is None:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # A block takes a cache too; that it has grown by then would be read as a later position.
    return any(name in names for name in TOKENS) and any(name in names for name in CACHES)
