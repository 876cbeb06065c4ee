"""The private names of torch's distributed training, each with what is done where it is gone.

FSDP has no public way to ask for the part of a parameter that a rank keeps while all of it is put together, and who
brings weights to a module, or a microbatch, is known from the stack alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from torchhook._torch.finding import missing


class Shard(NamedTuple):
    """A parameter of which each rank keeps a part; while its module runs, another tensor is in its place."""

    module: nn.Module
    name: str
    parameter: Tensor
    value: Tensor
    """The part of this rank."""
    leaf: Tensor
    """Whose post-accumulate hooks say that a gradient came."""
    shape: torch.Size
    group: Any
    """FSDP1's; a DTensor knows its own."""
    unit: Any
    """What puts it together and takes it apart again."""


def shards(module: nn.Module) -> list[Shard]:
    """What a wrapper of FSDP1, or a module of FSDP2, keeps; nothing where torch no longer tells."""
    try:
        if hasattr(type(module), "_get_fsdp_state"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            one = getattr(state, "_fsdp_param_group", None)
            groups = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
            kept = [(p._module_info, p.sharded_param) for group in groups for p in group.fsdp_params]
            return [Shard(m, n, p, p, p, p.shape, None, state) for info, p in kept for m, n in _places(info)]
        handle: Any = vars(module).get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            return []
        group = handle.process_group if handle.uses_sharded_strategy else None
        if not flat._params:
            return [
                Shard(
                    handle._fully_sharded_module,
                    "_flat_param",
                    flat,
                    getattr(flat, "_local_shard", flat),  # the same, until its first call
                    flat,
                    flat.shape,
                    group,
                    handle,
                )
            ]
        named = zip(flat._param_infos, flat._params, flat._shapes, strict=True)
        return [Shard(i.module, i.param_name, p, p, flat, shape, group, handle) for i, p, shape in named]
    except AttributeError:
        return []


def _places(info: Any) -> list[tuple[nn.Module, str]]:
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def expects_gradients(unit: Any) -> bool:
    """Whether FSDP takes the gradients that arrive now; where nobody knows, it may."""
    state = getattr(unit, "_training_state", None)
    return "BACKWARD" in getattr(state, "name", "BACKWARD")


def syncs_gradients(wrapper: Any) -> bool | None:
    """Whether FSDP1 reduces the gradients of this pass (``no_sync``); ``None`` where torch does not tell."""
    found: bool | None = getattr(wrapper, "_sync_gradients", None)
    return found


def end_forward(modules: Iterable[nn.Module], values: Callable[[], Iterable[Tensor]]) -> None:
    """Have FSDP do what it does when forward returns, for a pass that was left: ``values`` are what it gave instead.

    ``modules`` are all that may be running or have been made ready to, from the outside in. Where torch no longer
    tells how, that is an error: weights that stay gathered would not be seen to change any more.
    """
    units = {id(unit): (unit, module) for module in modules if (unit := _unit(module)) is not None}
    found = values() if units and torch.is_grad_enabled() else []
    output = tuple(value for value in found if value.requires_grad)
    try:
        for unit, module in reversed(units.values()):
            (_end_forward1 if unit is module else _end_forward2)(unit, module, output)
    except (AttributeError, ImportError):
        missing("FSDP's _post_forward", "to end its forward pass early (stop=True)")()


def _unit(module: nn.Module) -> Any:
    """FSDP2's state of a module, or a wrapper of FSDP1 itself."""
    if hasattr(type(module), "_get_fsdp_state"):
        return module._get_fsdp_state()  # type: ignore[operator]
    return module if type(module).__name__ == "FullyShardedDataParallel" else None


def _end_forward2(state: Any, module: nn.Module, output: tuple[Tensor, ...]) -> None:
    if state._training_state.name == "FORWARD":
        state._post_forward(module, None, output)
        getattr(state, "_modules_to_run_forward", set()).clear()  # those of one unit, some of which have run
    one = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if one is None else one:
        if group is not None and group._all_gather_result is not None:  # gathered ahead, for a module that did not run
            group.wait_for_unshard()
            group.reshard()


def _end_forward1(wrapper: Any, module: nn.Module, output: tuple[Tensor, ...]) -> None:
    from torch.distributed.fsdp import _runtime_utils as fsdp1

    handle = wrapper._handle
    if wrapper.training_state.name == "FORWARD_BACKWARD":
        fsdp1._post_forward(wrapper, handle, fsdp1._post_forward_reshard, module, None, output)
    elif handle is not None and handle._prefetched:
        fsdp1._reshard(wrapper, handle, True)


_HAS_RANKS = distributed.is_available()  # a build has them or not


def are_ranks() -> bool:
    """Whether this process is one of a group."""
    return _HAS_RANKS and distributed.is_initialized()


def rank_store() -> Any:
    """Where ranks leave word for each other without waiting; ``None`` where there is one rank, or no such place."""
    if not are_ranks():
        return None
    find = getattr(distributed.distributed_c10d, "_get_default_store", lambda: None)
    return find() if distributed.get_world_size() > 1 else None


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


@contextlib.contextmanager
def refused_collectives(error: BaseException) -> Iterator[None]:
    """Whatever would wait for other ranks raises ``error`` in this block; where torch no longer tells, it waits."""
    if rank_store() is None:
        yield
        return
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        yield
        return

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "namespace", "") in _COLLECTIVES:
                raise error
            return func(*args, **(kwargs or {}))

    with Refuses():  # type: ignore[no-untyped-call]
        yield


# -- what runs: frames --------------------------------------------------------------------------------


def _frames(depth: int) -> Iterator[tuple[str, FrameType]]:
    """What is running in this thread, innermost first, each with the module in which it was written."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame
        frame = frame.f_back


def is_moving_weights(module: nn.Module) -> bool:
    """Whether FSDP or accelerate brings weights to a module or takes them away: none of that is the model's doing."""
    # Asked for every operation: the stack is looked at only where either may be at work.
    if "_hf_hook" not in module.__dict__ and not ("torch.distributed.fsdp" in sys.modules and are_ranks()):
        return False
    for name, frame in _frames(1):
        if name == "torch.nn.modules.module":
            return False
        # What accelerate puts in the place of forward is around the model's own; its hooks, which are objects, are not.
        if name.startswith("torch.distributed.fsdp.") or (name == "accelerate.hooks" and "self" in frame.f_locals):
            return True
    return False


def pipeline() -> Any:
    """The process group of the pipeline of which a stage runs in this thread; ``None`` where none does."""
    # A stage is an ordinary module, which does not know that it is one. Only who calls it does.
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if isinstance(kind, type):
        for name, frame in _frames(1):
            stage = frame.f_locals.get("self") if name == kind.__module__ else None
            if isinstance(stage, kind):
                return getattr(stage, "group", None) or distributed.group.WORLD
    return None
