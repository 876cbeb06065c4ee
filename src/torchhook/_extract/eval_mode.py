"""The model while rows go through it: in evaluation mode and on one device, shared by all threads that extract from it.

What a run may change and how that is put back is ``calling``'s business. What is special here is that the model may
have to move, and that nobody may move it back, or give its buffers back, while another thread still uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import torch
from torch import nn

from torchhook._core import calling
from torchhook._core.hooks import AtEnd, Turn
from torchhook._core.index import all_modules
from torchhook._core.offload import has_offloaded
from torchhook._values import devices
from torchhook.errors import ExtractError


@dataclasses.dataclass
class _Moved:
    """Where a model is for those who use it, and where it was before the first of them."""

    there: torch.device
    home: torch.device
    moves: bool
    aside: calling.SetAside
    give_back: AtEnd
    """Gives the model what was set aside, also where an interrupt comes meanwhile."""
    users: int = 0


# By id: a user's class may define equality, or no hash. Those in use are alive, and the last user removes them.
_models: dict[int, _Moved] = {}
_turn = Turn()


@contextlib.contextmanager
def evaluating_on(
    model: nn.Module, device: torch.device | str | None, attributes: bool = True
) -> Iterator[torch.device]:
    """The model in evaluation mode and on ``device``; the last of all threads that use it puts it back as it was.

    Random numbers aside, which belong to the process. Without ``attributes``, those of modules that have no buffers
    stay as they have become: for those who come here for every few batches.
    """
    with calling.evaluating(model):
        with _turn:
            # Locked until it has moved: another thread must not run a model of which half is elsewhere.
            moved = _moved(model, device, attributes)
            moved.users += 1
            try:
                if moved.users == 1:
                    moved.aside.clear_gradients()
                    if moved.moves:
                        model.to(moved.there)
            except BaseException:
                # Out of memory on the way, say: what has moved goes home.
                _leave(model, moved)
                raise
        try:
            yield moved.there
        finally:
            with _turn:
                _leave(model, moved)


def _moved(model: nn.Module, device: torch.device | str | None, attributes: bool) -> _Moved:
    # Weights that are offloaded are nowhere now, and must not be moved: what takes care of them moves the inputs, too.
    # Read off the modules themselves, once: this is done for every few batches, and each walk by torch takes longer.
    own = [(*module._parameters.values(), *module._buffers.values()) for module in all_modules(model)]
    homes = {tensor.device for tensors in own for tensor in tensors if tensor is not None}
    meta = torch.device("meta")
    offloaded = meta in homes and has_offloaded(model)
    if offloaded:
        homes.remove(meta)
    home = next(iter(homes), torch.device("cpu"))
    there = home if device is None else devices.named(device, "run_on")
    if str(there) == "cuda":  # to torch, it does not equal cuda:0
        there = torch.device("cuda", torch.cuda.current_device())
    known = _models.get(id(model))
    if known is None:
        # A model on several devices stays where it is: it knows how its parts belong together.
        moves = there != home and len(homes) == 1 and not offloaded
        modules = calling.all_modules(model)
        aside = calling.SetAside(modules, None if attributes else {id(m) for m in modules if m._buffers})
        known = _Moved(there, home, moves, aside, AtEnd(aside.give_back))
        _models[id(model)] = known
    elif device is not None and there != known.there:
        raise ExtractError(f"another thread extracts from this model on {known.there}: it cannot be on {there} too.")
    return known


def _leave(model: nn.Module, moved: _Moved) -> None:
    moved.users -= 1
    if moved.users:
        return
    del _models[id(model)]
    try:
        if moved.moves:
            model.to(moved.home)
    finally:
        # After the move, which makes new buffers: the model gets back the very objects that it had.
        moved.give_back()


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Random numbers go on after the block as if it had not been there.

    Only for the main thread: elsewhere, going back would hand numbers out again that the main thread has used since.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    restore = calling.random_numbers()
    try:
        yield
    finally:
        restore()
