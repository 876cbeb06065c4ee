"""A model at rest: in evaluation mode and on one device, for as long as anyone extracts from it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import torch
from torch import nn

from torchhook._core import calling
from torchhook.errors import ExtractError


@dataclasses.dataclass
class _Where:
    """Where a model is for those who use it, and where it was before the first of them."""

    there: torch.device
    home: torch.device
    moves: bool
    users: int = 0


@dataclasses.dataclass
class _Mode:
    """Whether a module was training before the first of those who use it."""

    training: bool
    users: int = 0


# By id: a user's class may define equality, or no hash. Those in use are alive, and the last user removes them.
_models: dict[int, _Where] = {}
_modules: dict[int, _Mode] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def at_rest(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """The model in evaluation mode and on ``device``; the last of all threads that use it puts it back as it was."""
    modules = list(model.modules())
    with _lock:
        where = _where(model, device)
        try:
            _begin(model, modules, where)
        except BaseException:
            _end(model, modules, where)
            raise
    try:
        yield where.there
    finally:
        with _lock:
            _end(model, modules, where)


def _where(model: nn.Module, device: torch.device | str | None) -> _Where:
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    home = next(iter(homes), torch.device("cpu"))
    there = home if device is None else torch.device(device)
    if str(there) == "cuda":
        there = torch.device("cuda", torch.cuda.current_device())
    known = _models.setdefault(id(model), _Where(there, home, there != home and len(homes) == 1))
    if device is not None and there != known.there:
        raise ExtractError(f"another thread extracts from this model on {known.there}: it cannot be on {there} too.")
    return known


def _begin(model: nn.Module, modules: list[nn.Module], where: _Where) -> None:
    where.users += 1
    for module in modules:
        _modules.setdefault(id(module), _Mode(module.training)).users += 1
    calling.set_evaluation(modules)
    if where.moves and where.users == 1:
        model.to(where.there)


def _end(model: nn.Module, modules: list[nn.Module], where: _Where) -> None:
    where.users -= 1
    if not where.users:
        del _models[id(model)]
        if where.moves:
            model.to(where.home)
    for module in modules:
        mode = _modules[id(module)]
        mode.users -= 1
        if not mode.users:
            module.training = mode.training
            del _modules[id(module)]
