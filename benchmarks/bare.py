"""What people write by hand, and the judge of every value: bare hooks that do ``output.detach().clone()``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def leaves(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and model outputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return []


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


@contextlib.contextmanager
def nothing(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Hooks that do nothing: what PyTorch itself takes for modules that have one, and no tool can save."""
    modules = dict(model.named_modules(remove_duplicate=False))
    handles = [modules[name].register_forward_hook(lambda module, args, output: None) for name in names]
    yield
    for handle in handles:
        handle.remove()


class Bare:
    """Hooks on named modules, until ``remove``: ``store[name]`` has the tensors of each call."""

    def __init__(self, model: nn.Module, names: Iterable[str], keep: Callable[[Tensor], Tensor] = clone) -> None:
        self.store: dict[str, list[list[Tensor]]] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        self._handles = [modules[name].register_forward_hook(self._hook(name, keep)) for name in names]

    def _hook(self, name: str, keep: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        calls = self.store.setdefault(name, [])

        # One tensor is what most layers return: looking for more would make what is compared with slower.
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if type(output) is Tensor:
                calls.append([keep(output)])
            else:
                calls.append([keep(leaf) for leaf in leaves(output)])

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Newest:
    """The shortest that is true, for speed alone: the newest output of each module, which must be one tensor."""

    def __init__(self, model: nn.Module, names: Iterable[str], keep: Callable[[Tensor], Tensor] = clone) -> None:
        self.store: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        self._handles = [modules[name].register_forward_hook(self._hook(name, keep)) for name in names]

    def _hook(self, name: str, keep: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        store = self.store

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            store[name] = keep(output)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Newest:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def same(found: Any, true: Any, tolerance: float = 0.0) -> bool:
    """Whether two nested values hold the same numbers, NaN being NaN; to the bit unless a tolerance is given."""
    ours, theirs = leaves(found), leaves(true)
    return len(ours) == len(theirs) and all(_equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _equal(found: Tensor, true: Tensor, tolerance: float) -> bool:
    if found.shape != true.shape:
        return False
    found = found.detach().to(true.device)
    if tolerance:
        reach = true.abs().amax().float() if true.numel() else 0
        return bool(((found.float() - true.float()).abs() <= tolerance * reach + 1e-12).all())
    return found.dtype == true.dtype and bool(((found == true) | ((found != found) & (true != true))).all())


def count_wrong(
    found: Callable[[str], list[Any]], true: Mapping[str, list[list[Tensor]]], tolerance: float = 0.0
) -> tuple[int, int]:
    """How many values are wrong, and of how many: each call of each site is one; what is missing is wrong."""
    wrong = total = 0
    for name, calls in true.items():
        values = found(name)
        total += len(calls)
        wrong += abs(len(calls) - len(values))
        wrong += sum(not same(value, call, tolerance) for value, call in zip(values, calls, strict=False))
    return wrong, total


def judged(model: nn.Module, names: Iterable[str], session: Any, run: Callable[[], object]) -> tuple[int, int]:
    """Wrong values of a session, beside bare cloning hooks in the very same pass, which come first."""
    with Bare(model, names) as bare:
        with session as rec:
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return count_wrong(rec.all, bare.store)
