"""The names of a model: every module, parameter and buffer under its original path.

What ``torch.compile``, DDP, FSDP and activation checkpointing put between a module and its parent never shows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchhook._torch import base_of
from torchhook.errors import SelectorError

Step = tuple[nn.Module, str, nn.Module]
"""From a module to one of its own: the one that holds it, its name there, and itself."""


class Found(Protocol):
    """What some selectors were answered by."""

    asks_more: bool
    """Whether what would be chosen depends on more than where modules are."""

    def holds(self) -> bool:
        """Whether what it was found by is as it was."""

    def chooses_the_same(self) -> bool:
        """Where that is so, and ``asks_more``, whether the same would be chosen."""


class Known(Found, Protocol):
    """What was found before, and is not looked for again."""

    def generators(self) -> list[nn.Module]:
        """Those of the modules on the ways to it that generate."""

    def steps(self) -> Iterable[Step]:
        """The ways to it."""


class Index:
    """The names of a model: modules by path, parameters and buffers by path."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model comes first: expected a torch.nn.Module, found {described(model)}")
        self.given = model
        self.root: nn.Module = unwrapped(model)
        """The model itself, without what wraps it."""
        self.model_name: str = type(self.root).__name__
        self.followed: list[Step] = []
        """What was followed to find what was asked for."""
        self.searched: list[nn.Module] = []
        """Modules of which all that they hold was looked at for it."""
        self.recalled: list[Known] = []
        """What needed no search, for it was asked for before."""
        self.answers: list[Found] = []
        """What was asked of it so far was answered by these: what was known before, and what a search has found."""
        self.answered: tuple[int, int] = (0, 0)
        """How many of the steps that were followed, and of the modules that were searched, these are made of."""

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by path. Found when first asked for: a large model takes long, and an exact name needs none."""
        return dict(_walk(self.given, "", (), self.followed, self.searched))

    def find(self, path: str, notes: list[Step] | None = None) -> nn.Module | None:
        """The module of an exact name, as the model is now; without going through the others."""
        module = self.root
        if not path:
            return module
        above: list[nn.Module] = []
        for name in path.split("."):
            children = module._modules
            if name not in children:  # no get: the children of TorchScript have none
                return None
            child = children[name]
            if child is None:
                return None
            if notes is not None:
                notes.append((module, name, child))
            if child._modules:
                above.append(module)
                child = unwrapped(child, notes)
                for other in above:
                    if child is other:  # a module that contains itself
                        return None
            module = child
        return module

    def is_as_it_was(self) -> bool:
        """Whether the modules that were found are still where they were."""
        # Loops, as most are short: a generator takes longer to begin than these to look at.
        for holder, name, child in self.followed:
            held = holder._modules
            if name not in held or held[name] is not child:
                return False
        for known in self.recalled:  # noqa: SIM110
            if not known.holds():
                return False
        return True

    def means_the_same(self) -> bool:
        """Whether what was asked for would be found again: the modules that were found, and no others."""
        for found in self.answers:
            if not found.holds() or (found.asks_more and not found.chooses_the_same()):
                return False
        if self.given is not self.root and unwrapped(self.given) is not self.root:
            return False
        return len(self.followed) == self.answered[0] or self.is_as_it_was()

    def matching(self, pattern: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose paths a glob matches, in the order of the model. Only where it leads is looked."""
        return self._matching(self.root, "", pattern.split("."), glob_pattern(pattern), ())

    def _matching(
        self, module: nn.Module, path: str, parts: list[str], whole: re.Pattern[str], above: tuple[nn.Module, ...]
    ) -> Iterator[tuple[str, nn.Module]]:
        """What the rest of a glob, ``parts``, matches below a module."""
        if not parts:
            yield path, module
        elif parts[0] == "**":
            # Of the whole model once: what is left out is looked for there too, among modules and among parameters.
            below = (
                self.modules.items()
                if module is self.root
                else _walk(module, path, above, self.followed, self.searched)
            )
            if len(parts) == 1:
                yield from [found for found in below if found[0]]
                return
            matches, end = whole.fullmatch, "" if is_glob(parts[-1]) else parts[-1]  # which is told sooner
            yield from [found for found in below if found[0].endswith(end) and found[0] and matches(found[0] + ".")]
        else:
            fits, rest, children = glob_pattern(parts[0]).fullmatch, parts[1:], module._modules
            above = (*above, module)
            self.searched.append(module)
            for name, child in children.items():
                if child is not None and fits(name + "."):
                    self.followed.append((module, name, child))
                    here = f"{path}.{name}" if path else name
                    if not rest and not child._modules:  # as most are
                        yield here, child
                        continue
                    inner = unwrapped(child, self.followed)
                    if not any(inner is other for other in above):
                        yield from self._matching(inner, here, rest, whole, above)

    def matching_tensors(self, pattern: str) -> Iterator[tuple[str, nn.Module, str]]:
        """The parameters and buffers whose paths a glob matches, each with its owner and its name there."""
        above, _, last = pattern.rpartition(".")
        if last == "**":
            matches = glob_pattern(pattern).fullmatch
            yield from ((path, *found) for path, found in self.tensors.items() if matches(path + "."))
            return
        owners = list(self.matching(above)) if above else []
        if set(above.split(".")) <= {"", "**"}:  # the model itself may own them, too
            owners.insert(0, ("", self.root))
        fits = glob_pattern(last).fullmatch
        for path, owner in owners:
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is not None and fits(name + "."):
                        yield f"{path}.{name}" if path else name, owner, name

    def find_tensor(self, path: str, notes: list[Step] | None = None) -> tuple[nn.Module, str] | None:
        """The parameter or buffer of an exact name, as its owner and its name there."""
        above, _, name = path.rpartition(".")
        owner = self.find(above, notes)
        if owner is None or not any(name in held for held in (owner._parameters, owner._buffers)):
            return None
        return None if getattr(owner, name) is None else (owner, name)

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[nn.Module, str]]:
        """Parameters and buffers by path, each as its owner and its name there."""
        return {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in self.modules.items()
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        }

    def owned(self) -> list[Tensor]:
        """What the model owns now, and outlives its forward pass: every parameter and buffer."""
        found: list[Tensor] = []
        for module in all_modules(self.root):
            if module._parameters:
                found += [tensor for tensor in module._parameters.values() if tensor is not None]
            if module._buffers:
                found += [tensor for tensor in module._buffers.values() if tensor is not None]
        return found

    def plain_ids(self) -> frozenset[int]:
        """Those of them that are no ``nn.Parameter``, by id, and what they are views of: as quickly as can be."""
        found, seen, level = list[Tensor](), set[int](), [self.root]
        # By levels, with little of Python for each module: a model has hundreds.
        while level:
            for held in ([module._buffers for module in level], [module._parameters for module in level]):
                tensors = [tensor for own in held if own for tensor in own.values()]
                found += [tensor for tensor in tensors if type(tensor) is Tensor]
            holders = {id(module): module for module in level if module._modules}  # no other one can contain itself
            level = [
                child
                for key, module in holders.items()
                if key not in seen
                for child in module._modules.values()
                if child is not None
            ]
            seen.update(holders)
        return ids_of(found)

    # Modules are told apart by identity: a user's class may define equality, or no hash.

    @functools.cached_property
    def distinct(self) -> dict[int, nn.Module]:
        """Every module once, by id."""
        return {id(module): module for module in self.modules.values()}

    @functools.cached_property
    def wrappers(self) -> list[nn.Module]:
        """What DDP, FSDP and their like put around modules."""
        return [module for module in all_modules(self.given) if id(module) not in self.distinct]

    @functools.cached_property
    def _names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            names.setdefault(id(module), []).append(path)
        return names

    def names(self, module: nn.Module) -> list[str]:
        """Every name of a module: a shared one has several, one of another model none."""
        return self._names.get(id(module), [])


def ids_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The ids of tensors, and of what they are views of: other views of that share their memory."""
    found = list(tensors)
    bases = [base for tensor in found if type(tensor) is Tensor and (base := base_of(tensor)) is not None]
    return frozenset(map(id, found + bases))


def described(value: object) -> str:
    """What somebody has given for a model, and what would be one."""
    kind = type(value).__name__
    if kind != "ExportedProgram":
        return kind
    return f"{kind}: torch.export.unflatten(program) makes a module of it whose layers are called"


def is_callable(module: nn.Module) -> bool:
    """Whether the module can run at all: ``ModuleList`` and ``ModuleDict`` have no forward."""
    if getattr(type(module), "forward", None) is not _NO_FORWARD:  # TorchScript's cannot be asked for
        return True
    return not isinstance(module, CONTAINERS) or "forward" in vars(module)


_NO_FORWARD = nn.Module.forward
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""What only holds others, unless somebody has given it a forward."""


_WRAPPED = {
    "_orig_mod": {"OptimizedModule"},
    "module": {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "AveragedModel"},
    "_fsdp_wrapped_module": {"FullyShardedDataParallel"},
    "_checkpoint_wrapped_module": {"ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"},
}


def _is_wrapper(parent: nn.Module, child: str) -> bool:
    # By class name: importing dynamo or FSDP only to ask would cost seconds. A user's own attribute
    # called `module` keeps its name.
    return any(b.__name__ in _WRAPPED[child] and b.__module__.startswith("torch.") for b in type(parent).__mro__)


_SCRIPT = torch.jit.ScriptModule


def is_script(module: nn.Module) -> bool:
    """Whether a module is TorchScript. By its bases: asked for each hook, and ``isinstance`` is slow with its kind."""
    return _SCRIPT in type(module).__mro__


def unwrapped(module: nn.Module, notes: list[Step] | None = None) -> nn.Module:
    """What a wrapper wraps, which has its name; any other module itself. The steps through wrappers are noted."""
    while (inner := within(module)) is not module:
        if notes is not None:
            notes += [(module, name, inner) for name, held in module._modules.items() if held is inner]
        module = inner
    return module


def within(module: nn.Module) -> nn.Module:
    """What a wrapper holds, which may be another one; any other module itself."""
    children = module._modules
    if children:
        for name in _WRAPPED:
            if name in children and _is_wrapper(module, name):
                return cast(nn.Module, children[name])
    return module


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, wrappers included, in no order: several times as fast as with their names."""
    seen, waiting = set[int](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            if module._modules:
                waiting += [child for child in module._modules.values() if child is not None]


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its original path, parents first; a shared module comes under each of its names.

    Of a wrapper and what it wraps, which have the same path, only the wrapped module is given.
    """
    yield from _walk(model, "", (), [], [])


def _walk(
    module: nn.Module, path: str, above: tuple[nn.Module, ...], notes: list[Step], searched: list[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    # By a stack of its own: generators in each other hand every module on through all levels.
    waiting = [(module, path, above)]
    while waiting:
        module, path, above = waiting.pop()
        searched.append(module)
        children = module._modules
        if not children:
            yield path, module
            continue
        if any(module is other for other in above):  # a module that contains itself
            continue
        inner = next((name for name in _WRAPPED if name in children and _is_wrapper(module, name)), None)
        if inner is None:
            yield path, module
        above, below = (*above, module), []
        for name, child in children.items():
            if child is not None:
                notes.append((module, name, child))
                below.append((child, path if name == inner else f"{path}.{name}" if path else name, above))
        waiting += reversed(below)


# -- globs --------------------------------------------------------------------------------------------


def is_glob(path: str) -> bool:
    return any(mark in path for mark in "*?[")


@functools.lru_cache(maxsize=256)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression over a path with a dot after every component.

    ``**`` stands for any number of components, none included; ``*``, ``?`` and ``[…]`` stay inside one.
    """
    components = (r"(?:[^.]+\.)*" if c == "**" else _component(c) + r"\." for c in pattern.split("."))
    try:
        return re.compile("".join(components), re.DOTALL)
    except re.error as error:
        raise SelectorError(f"{pattern!r} is not a glob: {error}.") from error


def _component(glob: str) -> str:
    def piece(match: re.Match[str]) -> str:
        text = match[0]
        if len(text) > 1:
            inside = re.sub(r"[\\^\[&~|]", r"\\\g<0>", text[1:-1])
            return f"[^{inside[1:]}.]" if inside.startswith("!") else f"[{inside}]"
        return {"*": "[^.]*", "?": "[^.]"}.get(text) or re.escape(text)

    return re.sub(r"\[!?[^\]]+\]|.", piece, glob, flags=re.DOTALL)
