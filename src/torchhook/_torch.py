"""Every private name of torch that is used, once, each with what is done where it has vanished.

A name that is gone fails nothing at import: it gives a slower way to the same answer, or one clear error at the moment
it is needed. ``tests/test_torch.py`` takes each of them away in turn.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from torchhook import _torch_version
from torchhook.errors import TorchVersionError

_torch_version.check(torch.__version__)


def _find(path: str, default: Any, root: Any = torch) -> Any:
    """What a dotted path leads to, or ``default`` where a part of it has vanished."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return default
    return root


def _missing(path: str, purpose: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TorchVersionError(
            f"torch {torch.__version__} has no {path}, which TorchHook needs {purpose}. Use a version of torch that "
            "the README names, or a newer TorchHook."
        )

    return refuse


# -- memory -----------------------------------------------------------------------------------------

lazy_clone: Callable[[Tensor], Tensor] = _find("_lazy_clone", torch.clone)
"""A tensor that shares memory until someone writes to it; an ordinary copy where torch cannot."""

is_lazy_clone: Callable[[Tensor], bool] = _find("_C._is_cow_tensor", lambda tensor: False)
"""Whether a tensor's memory has been shared by ``lazy_clone`` and not been written to since."""

base_of: Callable[[Tensor], Tensor | None] = _find("_base.__get__", lambda tensor: tensor, Tensor)
"""The tensor that this one is a view of, if it is one; itself where nobody knows: that only costs a closer look."""

use_count: Callable[[Tensor], int] = _find("_use_count", lambda tensor: sys.maxsize, Tensor)
"""How many hold a tensor inside of torch, its views among them, and Python as one; very many where nobody knows."""


def storage_key(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory, which its views share; ``None`` where it has none.

    Its address would do too, but asking for it ends copy-on-write.
    """
    try:
        storage = tensor.untyped_storage()
        key = getattr(storage, "_cdata", None)
        return int(key) if key is not None else storage.data_ptr() or None
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # sparse, fake, functional tensors
        return None


class _HeldStorage:
    """Stands for ``StorageWeakRef``: the key of held memory is not used again either, at the price of the memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def storage_ref(tensor: Tensor) -> Any:
    """Something that keeps the key of a tensor's memory its own for as long as it is held."""
    with contextlib.suppress(ImportError):
        from torch.multiprocessing.reductions import StorageWeakRef

        return StorageWeakRef(tensor.untyped_storage())
    return _HeldStorage(tensor.untyped_storage())


def version(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; its views count together."""
    found: int | None = getattr(tensor, "_version", None)
    return _no_versions() if found is None else found


def base(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    found: Any = getattr(tensor, "_base", _GONE)
    return _no_bases() if found is _GONE else found  # type: ignore[no-any-return]


_GONE = object()
_no_versions = _missing("Tensor._version", "to tell gradients before and after an in-place layer apart")
_no_bases = _missing("Tensor._base", "to find the gradients of views")


# -- torch.func ---------------------------------------------------------------------------------------

_functorch = _find("_C._functorch", None)
_stack_top = _find("_C._functorch.peek_interpreter_stack", lambda: None)
in_transform: Callable[[], bool] = _find("_C._are_functorch_transforms_active", lambda: _stack_top() is not None)
"""Whether a transform of ``torch.func`` is running."""

_level: Callable[[Tensor], int] = _find("_C._functorch.maybe_get_level", lambda tensor: -1)
is_wrapped: Callable[[Tensor], bool] = _find(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: _level(tensor) not in (-1, -2)
)
"""Whether a tensor is the wrapper of a transform, which is dead outside of it."""

_inside_func = "to read values inside torch.func"
_is_batched = _find("_C._functorch.is_batchedtensor", _missing("is_batchedtensor", _inside_func))
_batch_dim = _find("_C._functorch.maybe_get_bdim", _missing("maybe_get_bdim", _inside_func))
_unwrap = _find("_C._functorch.get_unwrapped", _missing("get_unwrapped", _inside_func))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor behind the wrappers of ``torch.func``; the dim of vmap comes first."""
    while in_transform() and is_wrapped(tensor):
        batched = _is_batched(tensor)
        dim = _batch_dim(tensor) if batched else 0
        tensor = _unwrap(tensor)
        tensor = tensor.movedim(dim, 0) if batched else tensor
    return tensor


# -- autograd -----------------------------------------------------------------------------------------

current_node: Callable[[], Any] = _find("_C._current_autograd_node", lambda: None)
"""The step of the backward pass that runs in this thread, if one does."""

torch_task: Callable[[], int] = _find("_C._current_graph_task_id", lambda: -1 if current_node() is None else 0)
"""As ``graph_task``, by torch's own count: -1 means surely none."""
ended_tasks: set[int] = set()
"""Backward passes that torch counts as running while what was to be called after them runs."""


def graph_task() -> int:
    """The backward pass that is running in this thread; -1 for none."""
    return -1 if (task := torch_task()) in ended_tasks else task


next_sequence_number: Callable[[], int] = _find("_C._autograd._get_sequence_nr", lambda: 0)
"""The number of the next step that autograd will note in this thread."""

_sequence_number = _missing("Node._sequence_nr", "to know the order of the backward pass")


def sequence_number(node: Any) -> int:
    """Autograd numbers its steps in the order in which they are made."""
    found = getattr(node, "_sequence_nr", None)
    return _sequence_number() if found is None else int(found())


saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    _find("_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: (None, None)), True
)
"""The innermost hooks on what autograd saves; where nobody knows, there may be some."""


def after_backward(function: Callable[[], None]) -> None:
    """From inside a gradient hook: call ``function`` once the backward pass that is running has ended."""
    _find("_execution_engine.queue_callback", _no_queue, torch.autograd.Variable)(function)


_no_queue = _missing("Variable._execution_engine", "to see the gradients of several tensors together")


# -- functional calls ---------------------------------------------------------------------------------

unheard: Callable[[], contextlib.AbstractContextManager[Any]] = _find("_C.DisableTorchFunction", contextlib.nullcontext)
"""No ``TorchFunctionMode`` hears what is done in this block; where that is gone, the mode has to ignore it itself."""


def mode_is_on(mode: TorchFunctionMode) -> bool:
    """Whether a mode is on torch's stack, at any depth."""
    return any(_mode_at(i) is mode for i in range(_modes_on()))


def turn_off(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, wherever it is: others may have come after it."""
    above = []
    while mode_is_on(mode):
        top = _pop_mode()
        if top is not mode:
            above.append(top)
    for other in reversed(above):
        _push_mode(other)


_stack = "to listen to operations"
_modes_on = _find("_C._len_torch_function_stack", _missing("_len_torch_function_stack", _stack))
_mode_at = _find("_C._get_function_stack_at", _missing("_get_function_stack_at", _stack))
_pop_mode = _find("_C._pop_torch_function_stack", _missing("_pop_torch_function_stack", _stack))
_push_mode = _find("_C._push_on_torch_function_stack", _missing("_push_on_torch_function_stack", _stack))


def attention_weights(arguments: Iterable[Any]) -> Tensor:
    """The weights of the fused call of ``nn.MultiheadAttention``, given its arguments."""
    fused = _find("_native_multi_head_attention", _missing("_native_multi_head_attention", "to compute its maps"))
    found: Tensor = fused(*arguments)[1]
    return found


def materialized(bias: Any, device: torch.device) -> Tensor:
    """A causal bias of ``torch.nn.attention.bias`` as numbers."""
    make = getattr(bias, "_materialize", _missing("CausalBias._materialize", "to read a causal bias"))
    found: Tensor = make(device)
    return found


# -- values -------------------------------------------------------------------------------------------


class _NoPytree:
    """Stands for the registry where it has vanished: nothing is registered."""

    SUPPORTED_NODES: ClassVar[dict[type, Any]] = {}

    @staticmethod
    def register_pytree_node(*args: Any, **kwargs: Any) -> None:
        """``torch.export`` will say that it cannot return such a class."""


_pytree = _find("utils._pytree", _NoPytree)
_pytree = _pytree if hasattr(_pytree, "SUPPORTED_NODES") else _NoPytree
pytree_nodes: Mapping[type, Any] = _pytree.SUPPORTED_NODES
"""How torch's pytree opens and rebuilds the classes it knows: ``flatten_fn`` and ``unflatten_fn``."""


def register_pytree_node(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], rebuild: Callable[[Any, Any], Any]
) -> None:
    """Let torch open a class of this library as it opens tuples; ``torch.export`` returns no others."""
    _pytree.register_pytree_node(kind, flatten, rebuild, serialized_type_name=f"torchhook.{kind.__name__}")


_quantized = "to read a quantized tensor back"
quantized_per_tensor: Callable[..., Tensor] = _find(
    "_make_per_tensor_quantized_tensor", _missing("_make_per_tensor_quantized_tensor", _quantized)
)
quantized_per_channel: Callable[..., Tensor] = _find(
    "_make_per_channel_quantized_tensor", _missing("_make_per_channel_quantized_tensor", _quantized)
)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor as they are: the public names want it coalesced."""
    if not hasattr(tensor, "_indices"):
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    return tensor._indices(), tensor._values()


# -- what runs: frames --------------------------------------------------------------------------------
#
# Some questions have no answer in torch but on Python's stack: which checkpointed segment runs, and whether a module
# runs already. They are asked by the types of what lies there, not by the names of functions, which change.

_MODULES = "torch.nn.modules.module"
_CALL: CodeType | None = _find("_call_impl.__code__", _find("__call__.__code__", None, nn.Module), nn.Module)


def frames(depth: int) -> Iterator[FrameType]:
    """What runs in this thread, from the caller's caller on outwards; ``depth`` passes over some more."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def times_running(module: nn.Module) -> int:
    """How many calls of a module are under way in this thread."""
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in frames(1))


def innermost_module() -> nn.Module | None:
    """The module whose call is the latest under way in this thread."""
    return next((frame.f_locals.get("self") for frame in frames(1) if frame.f_code is _CALL), None)


def in_bare_segment() -> bool:
    """Whether the running code is in a checkpointed function directly, and not in a module that the function calls."""
    for frame in frames(1):
        if frame.f_globals.get("__name__") == _MODULES:
            return False
        if frame.f_globals is vars(checkpoint):
            return True
    return False


_Segment = _find("_CheckpointFrame", None, checkpoint)
_Reentrant = _find("CheckpointFunction._backward_cls", None, checkpoint)


def segments() -> tuple[Any, list[Any]]:
    """The checkpointed segment that is being recomputed, if one is, and those in it that run for the first time.

    Innermost first; they are torch's own objects, the same in the first run and in the recomputation.
    """
    recomputed, first = None, []
    for frame in frames(1):
        if frame.f_globals is vars(checkpoint):
            recomputed, started = _segments_in(frame.f_locals.values())
            first += started
            if recomputed is not None:
                break
        elif frame.f_code is _CALL:
            first += _segments_of(frame.f_locals.get("self"))
    if not first and recomputed is None:  # whoever checkpoints by hooks of its own leaves nothing on the stack
        recomputed, first = _segments_hooked()
    return recomputed, first


def will_run_again() -> bool:
    """Whether the running code is in a reentrant checkpoint that runs for the first time: without gradients, which
    the recomputation has. Where nobody knows, it may be."""
    return _Reentrant is None or any(isinstance(segment, _Reentrant) for segment in segments()[1])


def _segments_in(values: Iterable[Any]) -> tuple[Any, list[Any]]:
    for value in values:
        if _Segment is not None and isinstance(value, _Segment):
            return value, []
        if _Reentrant is not None and isinstance(value, _Reentrant):
            return (value, []) if current_node() is value else (None, [value])
        waiting = getattr(value, "gi_frame", None)  # a generator that waits while the segment runs
        if _Segment is not None and waiting is not None:
            held = [inner for inner in waiting.f_locals.values() if isinstance(inner, _Segment)]
            if held:
                return None, held
    return None, []


def _segments_of(module: Any) -> list[Any]:
    """Those that a module started which checkpoints itself by hooks: it holds them while it runs."""
    composable = sys.modules.get("torch.distributed._composable.contract")
    states = vars(module).get(getattr(composable, "STATE_KEY", None)) if composable is not None else None
    return [held for state in (states or {}).values() for held in _segments_in(vars(state).values())[1]]


def _segments_hooked() -> tuple[Any, list[Any]]:
    """By the hooks that a checkpoint puts on what autograd saves: those of a recomputation know it by a reference."""
    for hook in saved_tensor_hooks() or ():
        for cell in getattr(hook, "__closure__", None) or ():
            held = cell.cell_contents
            if _Segment is not None and isinstance(held, _Segment):
                return None, [held]
            if _Segment is not None and isinstance(held, weakref.ref) and isinstance(held(), _Segment):
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
    seen: list[tuple[Any, list[Any]]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(segments())
        return x.sin()

    def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = checkpoint.checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
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
