"""The names of a model: every module, parameter and buffer under its original path.

What ``torch.compile``, DDP, FSDP and activation checkpointing put between a module and its parent never shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor, nn


class Index:
    """The names of a model: modules by path, parameters and buffers by path."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, found {described(model)}")
        self.given = model
        self.root = unwrapped(model)
        """The model itself, without what wraps it."""

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by path. Found when first asked for: a large model takes long, and an exact name needs none."""
        return dict(walk(self.given))

    def find(self, path: str) -> nn.Module | None:
        """The module of an exact name, as the model is now; without going through the others."""
        module, above = self.root, set[int]()
        for name in path.split(".") if path else ():
            above.add(id(module))
            children = module._modules
            if name not in children:  # no get: the children of TorchScript have none
                return None
            child = children[name]
            if child is None or id(module := unwrapped(child)) in above:  # or a module that contains itself
                return None
        return module

    def find_tensor(self, path: str) -> tuple[nn.Module, str] | None:
        """The parameter or buffer of an exact name, as its owner and its name there."""
        above, _, name = path.rpartition(".")
        owner = self.find(above)
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

    def owned(self) -> Iterator[Tensor]:
        """What the model owns now, and outlives its forward pass: every parameter and buffer."""
        for module in all_modules(self.root):
            for held in (module._parameters, module._buffers):
                if held:
                    yield from (tensor for tensor in held.values() if tensor is not None)

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


def described(value: object) -> str:
    """What somebody has given for a model, and what would be one."""
    kind = type(value).__name__
    if kind != "ExportedProgram":
        return kind
    return f"{kind}: torch.export.unflatten(program) makes a module of it whose layers are called"


def is_callable(module: nn.Module) -> bool:
    """Whether the module can run at all: ``ModuleList`` and ``ModuleDict`` have no forward."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


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


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper wraps, which has its name; any other module itself."""
    if not module._modules:
        return module
    for name in _WRAPPED:
        if name in module._modules and _is_wrapper(module, name):
            return unwrapped(module._modules[name])  # type: ignore[arg-type]
    return module


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, wrappers included, in no order: several times as fast as with their names."""
    seen, waiting = set[int](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(child for child in module._modules.values() if child is not None)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its original path, parents first; a shared module comes under each of its names.

    Of a wrapper and what it wraps, which have the same path, only the wrapped module is given.
    """
    yield from _walk(model, "", ())


def _walk(module: nn.Module, path: str, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    if any(module is other for other in above):  # a module that contains itself
        return
    children = module._modules
    inner = next((name for name in _WRAPPED if name in children and _is_wrapper(module, name)), None)
    if inner is None:
        yield path, module
    if not children:
        return
    above = (*above, module)
    for name, child in children.items():
        if child is not None:
            below = path if name == inner else f"{path}.{name}" if path else name
            if child._modules:
                yield from _walk(child, below, above)
            else:
                yield below, child
