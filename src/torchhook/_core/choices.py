"""What selectors chose of a model, found again without a search while its modules are where they were.

Whoever opens a session for each call asks the same of the same model again and again. Nothing here keeps a model, or a
part of one: a module may know who holds it, so that even one of its layers would.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torchhook._core.generators import Generators, holds_few
from torchhook._core.index import CONTAINERS, Index, Step, is_callable, is_glob, is_script
from torchhook._core.targets import Outputs, Target

_MOST = 16
"""So many choices are remembered of one model, the newest."""

_Ref = Callable[[], Any]
_of_models: dict[int, tuple[_Ref, dict[Any, Choice]]] = {}
"""By the model's id, with a weak reference that takes it away when the model goes."""


def key_of(selectors: Any, exclude: Any, port: str) -> Any:
    """What a choice is remembered by; ``None`` where what it means may change while the model does not.

    That is so of functions, which may look at anything, of modules, and of standard names.
    """
    chosen = _plain(selectors)
    left_out = None if exclude is None else _plain(exclude)
    return None if chosen is None or (exclude is not None and left_out is None) else (chosen, left_out, port)


def _plain(selectors: Any) -> Any:
    kind = type(selectors)
    if kind is str:
        return None if selectors.startswith("@") else selectors
    if kind is re.Pattern:
        return selectors
    if kind in (list, tuple):
        # Names alone, as most are, without a call for each.
        parts = tuple(selectors)
        if set(map(type, parts)) != {str} or [part for part in parts if part[:1] == "@"]:
            parts = tuple(map(_plain, parts))
        return None if None in parts else parts
    # By a weak reference: a class may know a model. One of another kind may say by itself what is of its kind.
    return weakref.ref(selectors) if kind is type else None


def recall(index: Index, key: Any) -> Sequence[Target] | None:
    """What was chosen by the same before; ``None`` where nothing is known, or the model is not what it was."""
    of_model = _of_models.get(id(index.given))
    if of_model is None or of_model[0]() is not index.given:
        return None
    known = of_model[1]
    choice = known.get(key)
    if choice is None:
        return None
    found = choice.found(index.root)
    if found is None:
        known.pop(key, None)
        return None
    index.recalled.append(choice)
    index.answers.append(choice)
    return found


def remember(index: Index, key: Any, found: Sequence[Target]) -> None:
    """Note what was chosen by what ``index`` has followed and searched for it, and for nothing else: no tensors."""
    root, given, model_id = index.root, index.given, id(index.given)
    near = Generators(root, index.followed)
    if any(map(is_script, (root, *[step[0] for step in index.followed], *index.searched, *near.searched))):
        return  # which gives other objects for what it holds each time
    model, known = _of_models.get(model_id, (_nothing, {}))
    if model() is not given:
        known = {}
        _of_models[model_id] = weakref.ref(given, lambda gone: _forget(model_id, gone)), known
    while len(known) >= _MOST:
        known.pop(next(iter(known)), None)
    # What globs end with, if that is a name: parameters and buffers of that name would be chosen too.
    ends = [re.split("[/#:]", name.rpartition(".")[2])[0] for name in _names(key) if is_glob(name)]
    known[key] = choice = Choice(index, found, near, frozenset(end for end in ends if not is_glob(end)))
    index.answers.append(choice)
    index.answered = len(index.followed), len(index.searched)


def note(index: Index) -> None:
    """Note, once all that a session wants was asked for, what was looked through for selectors asked each time."""
    if len(index.searched) != index.answered[1]:
        index.answers.append(_Asked(index))


class _Asked:
    """What would be found by selectors that are asked each time, until modules come or go."""

    asks_more = False

    def __init__(self, index: Index) -> None:
        # TorchScript gives other objects for what it holds each time.
        self._searched = _Searched([module for module in index.searched if not is_script(module)])

    def holds(self) -> bool:
        return self._searched.hold_the_same()

    def chooses_the_same(self) -> bool:
        return True


def _names(key: Any) -> Iterator[str]:
    if isinstance(key, str):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from _names(part)


def _forget(model_id: int, gone: Any) -> None:
    if _of_models.get(model_id, (None,))[0] is gone:  # the id may be another model's by now
        _of_models.pop(model_id, None)


class _Searched:
    """Modules of which all that they hold was looked at."""

    # All by their ids, which are theirs as long as they are alive.
    __slots__ = ("_held", "_whole")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        whole = {id(module): module for module in modules}
        held = [child for module in whole.values() for child in module._modules.values() if child is not None]
        self._whole = [
            (weakref.ref(module), id(type(module)), [*module._modules], [*map(id, module._modules.values())])
            for module in whole.values()
        ]
        self._held = [
            (weakref.ref(child), id(type(child)))
            for child in {id(child): child for child in held}.values()
            if id(child) not in whole
        ]

    def modules(self) -> list[Any]:
        """Those of them that are alive; ``None`` for each that is not."""
        return [ref() for ref, *_ in self._whole]

    def hold_the_same(self) -> bool:
        """Whether every module that was looked at is where it was, of its class, and no other has come."""
        # Quickly: a model has hundreds of them, and this is asked whenever a session opens and closes.
        for ref, kind, names, children in self._whole:
            module: Any = ref()
            if id(type(module)) != kind:  # or gone
                return False
            held = module._modules
            if (held or names) and ([*held] != names or [*map(id, held.values())] != children):
                return False
        for ref, kind in self._held:  # noqa: SIM110 (as above)
            if id(type(ref())) != kind:
                return False
        return True


class Choice:
    """What some selectors chose, and what has to be as it was for them to choose the same."""

    # No class is held either: it may know a model, too. An object that is where it was keeps the class of its id alive.
    __slots__ = (
        "_are_outputs",
        "_containers",
        "_followed",
        "_generate",
        "_modules",
        "_near",
        "_root",
        "_searched",
        "_sites",
        "_tensors",
        "_too_large",
        "asks_more",
    )

    def __init__(self, index: Index, found: Sequence[Target], near: Generators, tensor_names: frozenset[str]) -> None:
        self._root = weakref.ref(index.root), id(type(index.root))
        searched = set(map(id, index.searched))
        self._searched = _Searched(index.searched) if index.searched else None
        # Only what generates depends on these.
        others = [module for module in near.searched if id(module) not in searched]
        self._near = _Searched(others) if others else None
        self._too_large = [weakref.ref(module) for module in near.too_large]
        self._generate = [weakref.ref(module) for module in near.told()]
        steps = {(id(holder), name): (holder, name, child) for holder, name, child in index.followed}
        self._followed = [
            (weakref.ref(holder), name, weakref.ref(child), id(type(child)))
            for holder, name, child in steps.values()
            if id(holder) not in searched
        ]
        # Any of these may be given a forward of its own, or lose it.
        reached = {id(module): module for module in (*index.searched, *[child for _, _, child in steps.values()])}
        containers = [module for module in reached.values() if isinstance(module, CONTAINERS)]
        self._containers = [(weakref.ref(module), is_callable(module)) for module in containers]
        self._sites = tuple([target.site for target in found])
        self._modules = [weakref.ref(target.module) for target in found]
        self._are_outputs = Outputs.of(found, index.root) is not None
        self._tensors = tensor_names
        self.asks_more = bool(containers or tensor_names)

    def holds(self) -> bool:
        """Whether every module on the ways to what was chosen is where it was, and no other has come."""
        for holder, name, child, kind in self._followed:
            above = holder()
            now = None if above is None else above._modules.get(name)
            if now is None or now is not child() or id(type(now)) != kind:
                return False
        return self._searched is None or self._searched.hold_the_same()

    def chooses_the_same(self) -> bool:
        """Whether the same is left out, as far as that is told by more than where modules are."""
        for container, was in self._containers:
            module = container()
            if module is None or is_callable(module) is not was:
                return False
        return not (self._tensors and self._has_tensors())

    def _generates_the_same(self) -> bool:
        for too_large in self._too_large:
            large = too_large()
            if large is None or holds_few(large):
                return False
        return self._near is None or self._near.hold_the_same()

    def _has_tensors(self) -> bool:
        """Whether there is a parameter or buffer now of a name that would choose it."""
        modules = [] if self._searched is None else self._searched.modules()
        own = [held for module in modules for held in (module._parameters, module._buffers) if held]
        return not all(map(self._tensors.isdisjoint, own))

    def found(self, root: nn.Module) -> Sequence[Target] | None:
        """What was chosen; ``None`` where the model has changed."""
        known, kind = self._root
        if known() is not root or id(type(root)) != kind or not self.holds():
            return None
        if not (self.chooses_the_same() and self._generates_the_same()):
            return None
        modules: list[Any] = [ref() for ref in self._modules]
        if [1 for module in modules if module is None]:
            return None
        outputs = Outputs(self._sites, modules)
        return outputs if self._are_outputs else list(outputs)

    def generators(self) -> list[nn.Module]:
        """The modules that generate, as they were found on the ways to what was chosen."""
        return [module for ref in self._generate if (module := ref()) is not None]

    def steps(self) -> Iterator[Step]:
        """The ways to what was chosen."""
        for holder in [] if self._searched is None else self._searched.modules():
            if holder is not None:
                yield from ((holder, name, child) for name, child in holder._modules.items() if child is not None)
        for holder_ref, name, child_ref, _ in self._followed:
            if (holder := holder_ref()) is not None and (child := child_ref()) is not None:
                yield holder, name, child


def _nothing() -> None:
    """Stands for what a name holds that holds nothing."""
