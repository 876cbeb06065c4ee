"""What runs, as Python's stack tells it: which modules, and which checkpointed segments.

Some questions have no answer in torch but there: which checkpointed segment runs, and whether a module runs already.
They are asked by the types of what lies on the stack, not by the names of functions, which change.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._torch.autograd import current_node, graph_task, saved_tensor_hooks, torch_task
from torchhook._torch.finding import find

_MODULES = "torch.nn.modules.module"
_CALL: CodeType | None = find("_call_impl.__code__", find("__call__.__code__", None, nn.Module), nn.Module)


def caller(depth: int) -> FrameType | None:
    """The frame of the caller's caller; ``depth`` passes over some more. ``f_back`` leads on outwards."""
    return sys._getframe(depth + 1)


def frames(depth: int) -> Iterator[FrameType]:
    """What runs in this thread, from the caller's caller on outwards; ``depth`` passes over some more."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def times_running(module: nn.Module) -> int:
    """How many calls of a module are under way in this thread."""
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in frames(1))


def runs_inside_itself(module: nn.Module) -> bool:
    """Whether a call of a module is under way inside of another one, in this thread."""
    return times_running(module) > 1


def innermost_module() -> nn.Module | None:
    """The module whose call is the latest under way in this thread; none outside of what is recomputed."""
    # Torch's own count first: it says -1 nearly always, and graph_task is one call more.
    names = _names() if torch_task() != -1 and graph_task() != -1 else None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # as frames does, quicker: this is asked at every operation that has a site
        if frame.f_code is _CALL:
            module: nn.Module | None = frame.f_locals.get("self")
            return module
        if names is not None and frame.f_globals is names and _segments_in(frame.f_locals.values())[0] is not None:
            return None  # what is further out only asked for the backward pass
        frame = frame.f_back
    return None


# Looked for each time, and imported by nobody here: torch 2.6 leaves that to its users, since it brings sympy along,
# which takes longer than the rest and adds to Python's filters of warnings.
def _names() -> dict[str, Any] | None:
    """What stands in torch's file of checkpoints; ``None`` as long as nobody has imported it, and so can use it."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    return None if checkpoint is None else vars(checkpoint)


def _kinds() -> tuple[Any, Any]:
    """The types of its segments, those that are not reentrant first; ``()``, which nothing is, where there is none."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    return find("_CheckpointFrame", (), checkpoint), find("CheckpointFunction._backward_cls", (), checkpoint)


def bare_segments() -> list[Any]:
    """The segments that run for the first time around the running code, without a module's call in between.

    Innermost first: a function is checkpointed there, and not a module that the function calls.
    """
    found, names = list[Any](), _names()
    for frame in frames(1):
        if frame.f_globals.get("__name__") == _MODULES:
            break
        if frame.f_globals is names:
            recomputed, first = _segments_in(frame.f_locals.values())
            found += first
            if recomputed is not None:
                break
    return found


# What segments of either kind call when they are recomputed, by what they call it themselves.
_RUNS_AGAIN = ("recompute_fn", "run_function")


def around_recomputation(segment: Any, around: Callable[..., Any]) -> bool:
    """Have ``around(function, *args)`` called in place of a segment's function when it is recomputed, if that can be.

    It goes with the graph, as the segment does.
    """
    for name in _RUNS_AGAIN:
        function = getattr(segment, name, None)
        if callable(function):
            setattr(segment, name, functools.partial(around, function))
            return True
    return False


def segments() -> tuple[Any, list[Any]]:
    """The checkpointed segment that is being recomputed, if one is, and those in it that run for the first time.

    Innermost first; they are torch's own objects, the same in the first run and in the recomputation.
    """
    recomputed, first, names = None, [], _names()
    # Who checkpoints itself by hooks puts some on what autograd saves, too; to read a frame's names takes long.
    hooked = saved_tensor_hooks() is not None
    composable = sys.modules.get("torch.distributed._composable.contract") if hooked else None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # as frames does, quicker: an edit asks this at every call
        if frame.f_globals is names:
            recomputed, started = _segments_in(frame.f_locals.values())
            first += started
            if recomputed is not None:
                break
        elif composable is not None and frame.f_code is _CALL:
            first += _segments_of(frame.f_locals.get("self"), composable)
        frame = frame.f_back
    # Whoever checkpoints by hooks of its own leaves nothing on the stack.
    if hooked and not first and recomputed is None:
        recomputed, first = _segments_hooked()
    return recomputed, first


def in_checkpoint() -> bool:
    """Whether a segment that is not reentrant runs here, for the first time or again."""
    hooks, names = saved_tensor_hooks(), _names()
    if hooks is None or names is None:
        return False
    if getattr(hooks[0], "__globals__", None) is names:
        return True
    recomputed, first = segments()  # others may have put hooks of their own inside of it
    return recomputed is not None or bool(first)


def will_run_again() -> bool:
    """Whether the running code is in a reentrant checkpoint that runs for the first time: without gradients, which
    the recomputation has. Where nobody knows, it may be."""
    if _names() is None:
        return False
    reentrant = _kinds()[1]
    return not reentrant or any(isinstance(segment, reentrant) for segment in segments()[1])


def loses_graph() -> bool:
    """Whether the running code is in a reentrant checkpoint that runs for the first time and will have gradients: what
    it makes now is on no graph, and what the backward pass makes again is another tensor."""
    if _names() is None or torch.is_grad_enabled():
        return False
    reentrant = _kinds()[1]
    return any(isinstance(one, reentrant) and any(getattr(one, "needs_input_grad", ())) for one in segments()[1])


def _segments_in(values: Iterable[Any]) -> tuple[Any, list[Any]]:
    plain, reentrant = _kinds()
    for value in values:
        if isinstance(value, plain):
            return value, []
        if isinstance(value, reentrant):
            return (value, []) if current_node() is value else (None, [value])
        waiting = getattr(value, "gi_frame", None)  # a generator that waits while the segment runs
        if waiting is not None:
            held = [inner for inner in waiting.f_locals.values() if isinstance(inner, plain)]
            if held:
                return None, held
    return None, []


def _segments_of(module: Any, composable: Any) -> list[Any]:
    """Those that a module started which checkpoints itself by hooks: it holds them while it runs."""
    states = vars(module).get(getattr(composable, "STATE_KEY", None))
    return [held for state in (states or {}).values() for held in _segments_in(vars(state).values())[1]]


def _segments_hooked() -> tuple[Any, list[Any]]:
    """By the hooks that a checkpoint puts on what autograd saves: those of a recomputation know it by a reference."""
    plain, _ = _kinds()
    for hook in saved_tensor_hooks() or ():
        for cell in getattr(hook, "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, plain):
                return None, [held]
            if isinstance(held, weakref.ref) and isinstance(held(), plain):
                return held(), []
    return None, []


@functools.lru_cache(maxsize=1)
def understands_checkpoints() -> bool:
    """Whether ``segments`` tells what it should: tried once, on a checkpoint of each kind and one inside another.

    In a thread of its own, where nothing else is on the stack and no mode is on.
    """
    kinds = [(reentrant, nested) for reentrant in (False, True) for nested in (False, True)]
    with ThreadPoolExecutor(1) as thread:
        return all(thread.map(_understands, *zip(*kinds, strict=True)))


def _understands(reentrant: bool, nested: bool) -> bool:
    from torch.utils.checkpoint import checkpoint

    seen: list[tuple[Any, list[Any]]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(segments())
        return x.sin()

    def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
        return result

    def outer(x: Tensor) -> Tensor:
        return again(look, x).cos()

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        y = again(outer if nested else look, x)
        y.backward()
    # The first run knows every segment around it; a recomputation knows itself, and what runs anew inside it.
    (none, first), *later = seen
    known = [segment for segment, _ in later]
    return none is None and len(first) == 1 + nested and bool(known) and known[0] is first[-1]
