"""The base of the classic names that are modules: their help tells what they add to ``nn.Module``."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from torch import nn

from torchhook._core.index import described
from torchhook.errors import ArgumentError

# What a reader of help has no use for: bookkeeping of classes, and how a façade is copied and listed.
_PLUMBING = frozenset({"__abstractmethods__", "__annotations__", "__dict__", "__dir__", "__setstate__", "__weakref__"})


# An abstract metaclass, so that a user's class may derive from a façade and from an abstract class.
class _OwnNames(abc.ABCMeta):
    """Lists the names that a class adds to ``nn.Module``, whose eighty would hide the one that matters."""

    def __dir__(cls) -> list[str]:
        added = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
        shown = {name for name in added if not name.startswith("_") or name.startswith("__")}
        return sorted((shown - _PLUMBING) | {"__class__", "__doc__", "__init__", "__module__"})


class Facade(nn.Module, metaclass=_OwnNames):
    """A model with something around it."""

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        super().__init__()
        self.model = model

    def __dir__(self) -> Iterable[str]:
        # nn.Module asks the class, which is short of words.
        inherited = (name for base in type(self).__mro__ for name in vars(base))
        return sorted({*super().__dir__(), *inherited})  # type: ignore[no-untyped-call]


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, found {described(model)}.")
