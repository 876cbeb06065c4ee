"""What a forward pass may change of a model, remembered and put back: buffers, plain attributes, what these hold.

Of what they hold: tensors, arrays, lists, sets and dicts, and sources of random numbers. Objects of other classes keep
what the pass has made of them: nobody knows how they are put back.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook import _torch
from torchhook._core.hooks import AtEnd
from torchhook._values.elements import UNREADABLE, is_alike

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set"}


class Remembered(NamedTuple):
    """Something of a module that a forward pass may change."""

    module: nn.Module
    has_changed: Callable[[], bool]
    put_back: Callable[[], None]
    tensor: Tensor | None = None
    copy: Tensor | None = None
    """Of a tensor, whose contents are put back."""


def remembered(modules: Iterable[nn.Module], graphs: bool = True) -> list[Remembered]:
    """The buffers and plain attributes of modules as they are now; without ``graphs``, detached from theirs.

    What goes with a graph must hold no other: a model that keeps its last output would keep all of them.
    """
    seen: set[int] = set()
    return [Remembered(module, *ways) for module in modules for ways in _ways_back(module, seen, graphs)]


def put_back(kept: Collection[Remembered]) -> None:
    """Put everything back that was remembered; where it is as it was, a device is asked for that once in all."""
    held: list[Remembered] = []
    for one in kept:
        if one.tensor is None:
            one.put_back()
        else:
            held.append(one)
    pairs = [(one.tensor, one.copy) for one in held if one.tensor is not None and one.copy is not None]
    alone = _maybe_changed(pairs)
    for one in held:
        if id(one.tensor) in alone:
            one.put_back()


_Ways = tuple[Any, ...]
"""What tells whether something has changed, what puts it back, and the tensor that it is."""


@contextlib.contextmanager
def rewound(kept: Iterable[Remembered], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules as they were remembered, for a run that nobody may notice, in a block of ``undisturbed``.

    There are stand-ins for their tensors: copies of what the run may write to, because a graph may hold the tensors,
    and others with the same memory for the parameters, because hooks and gradients are on these.
    """
    modules, copies, parameters = list(modules), dict[int, Tensor](), dict[int, tuple[Tensor, Tensor]]()
    for one in kept:
        if one.tensor is None or one.copy is None:
            one.put_back()
        else:
            copies[id(one.tensor)] = one.copy.clone()
    for parameter in (p for module in modules for p in module._parameters.values()):
        # A subclass may be more than its numbers, and a lazy one has none.
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
            parameters[id(parameter)] = parameter, nn.Parameter(parameter.detach(), parameter.requires_grad)
    back = {id(stand_in): parameter for parameter, stand_in in parameters.values()}
    end = AtEnd(lambda: _substitute(modules, back))
    try:
        _substitute(modules, copies | {key: stand_in for key, (_, stand_in) in parameters.items()})
        yield
    finally:
        end()


def _substitute(modules: Iterable[nn.Module], stand_ins: Mapping[int, Tensor]) -> None:
    """Put other tensors, by the ids of those that are there, into modules and the lists and dicts that they hold."""
    for own in map(vars, modules):
        holders: list[Any] = [own, *(value for value in own.values() if isinstance(value, (list, dict, deque)))]
        for held in holders:
            for key in range(len(held)) if isinstance(held, (list, deque)) else list(held):
                if id(held[key]) in stand_ins:
                    held[key] = stand_ins[id(held[key])]


def _ways_back(module: nn.Module, seen: set[int], graphs: bool) -> Iterator[_Ways]:
    if isinstance(module, torch.jit.ScriptModule):  # it holds its attributes elsewhere
        for buffer in module.buffers(recurse=False):
            yield from _into(buffer, seen, graphs)
        return
    held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if not graphs:
        held = {name: _detached(value) for name, value in held.items()}
    if any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
        held = {"_buffers": module._buffers}  # its first run makes it another module, and that is meant to stay
    else:
        yield functools.partial(_is_reassigned, module, held), functools.partial(_reassign, module, held)
    for value in held.values():
        if type(value) not in _PLAIN:  # as most are
            yield from _into(value, seen, graphs)


_PLAIN = frozenset({bool, int, float, str, tuple, type(None)})
"""Nothing can be written into these."""


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _is_reassigned(module: nn.Module, held: dict[str, Any]) -> bool:
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return own.keys() != held.keys() or any(own[name] is not value for name, value in held.items())


def _reassign(module: nn.Module, held: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in held and name not in _OF_EVERY_MODULE]:
        del own[name]
    own.update(held)


def _as_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass may refuse whatever it was not made for, as the causal bias of torch 2.6 does: it is not asked."""

    @functools.wraps(function)
    def unasked(*args: Any) -> Any:
        with _torch.unheard():
            return function(*args)

    return unasked


def _into(value: Any, seen: set[int], graphs: bool) -> Iterator[_Ways]:
    """What tells of and puts back the contents of a value, where it is a tensor or a container."""
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        copy = _copy(value)
        if copy is not None:
            seen.add(id(value))
            yield functools.partial(_differs, value, copy), functools.partial(_refill, value, copy), value, copy
    elif isinstance(value, (list, deque, set, dict)):
        seen.add(id(value))
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        items = kind(value) if graphs else _detached_items(value, kind)
        yield lambda: _ids(value) != _ids(items), functools.partial(_replace_items, value, kind, items)
        for part in list(value.values() if isinstance(value, dict) else value):
            if graphs or _detached(part) is part:
                yield from _into(part, seen, graphs)
    elif (state := _state_of(value)) is not None:
        seen.add(id(value))
        read, write = state
        before = read()
        yield lambda: not _is_same(read(), before), lambda: write(before)


_ARRAY_BYTES = 1 << 20  # counters and averages; larger ones are data, and stay as the pass leaves them


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """What reads the state of a source of random numbers, or the contents of a plain array, and what writes it."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if type(value) is np.ndarray and value.flags.writeable and value.nbytes <= _ARRAY_BYTES:
        return value.copy, lambda copy: np.copyto(value, copy)
    if type(value) is bytearray:
        return lambda: bytes(value), lambda copy: value.__setitem__(slice(None), copy)
    return None


def _is_same(one: Any, other: Any) -> Any:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


# An ordered dict before a dict, whose methods leave its order behind.
_CONTAINERS = (list, deque, set, OrderedDict, dict)


def _detached_items(value: Any, kind: Any) -> Any:
    if issubclass(kind, dict):
        return kind((key, _detached(part)) for key, part in value.items())
    return kind(map(_detached, value))


def _replace_items(container: Any, kind: Any, items: Any) -> None:
    if _ids(container) != _ids(items):
        kind.clear(container)
        (kind.extend if kind in (list, deque) else kind.update)(container, items)


def _ids(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(part) for part in container]


# -- contents -------------------------------------------------------------------------------------------


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_AS_THEY_ARE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_SMALL = 1 << 16  # items up to which it is the questions that take time, not the numbers
_Pair = tuple[Tensor, Tensor]


@torch.no_grad()
@_as_plain
def _maybe_changed(pairs: Sequence[_Pair]) -> set[int]:
    """The ids of tensors, each with its copy, that may have to be refilled: each one is asked by itself then.

    All together, because the answer of a GPU is waited for: a model has hundreds of buffers, and mostly none changes.
    """
    # By their bits: a NaN is then like itself. What is the same but for the sign of a zero is looked at once more.
    groups: dict[Any, list[_Pair]] = {}
    alone: set[int] = set()
    for tensor, copy in pairs:
        known = tensor.dtype in _BITS or tensor.dtype in _AS_THEY_ARE
        if not known or type(tensor) is not Tensor or tensor.layout != torch.strided or not is_alike(tensor, copy):
            alone.add(id(tensor))
        elif tensor.numel() <= _SMALL:
            groups.setdefault((tensor.device, tensor.dtype), []).append((tensor, copy))
        elif tensor.device.type == "cpu":  # no waiting, and equality looks no further than to the first difference
            alone.add(id(tensor))
        else:
            groups[id(tensor)] = [(tensor, copy)]
    by_device: dict[torch.device, list[list[_Pair]]] = {}
    for group in groups.values():
        by_device.setdefault(group[0][0].device, []).append(group)
    for held in by_device.values():
        try:
            changed = bool(torch.stack([_differ(group) for group in held]).any())
        except UNREADABLE:  # a device without one of the operations
            changed = True
        if changed:
            alone.update(id(tensor) for group in held for tensor, _ in group)
    return alone


def _differ(group: list[_Pair]) -> Tensor:
    """Whether any tensor of one dtype differs from its copy, as a tensor: nobody waits for it."""
    if len(group) == 1:
        now, before = group[0]
    else:
        now, before = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*group, strict=True))
    bits = _BITS.get(now.dtype, now.dtype)
    return (now.view(bits) != before.view(bits)).any()


@torch.no_grad()
@_as_plain
def _refill(tensor: Tensor, copy: Tensor) -> None:
    if not is_alike(tensor, copy):
        tensor.data = copy.clone()
    elif not _is_equal(tensor, copy):  # a graph may hold it, and does not go with what is written to once more
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: the same number all along
                tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
        tensor.copy_(copy)


@torch.no_grad()
@_as_plain
def _differs(tensor: Tensor, copy: Tensor) -> bool:
    return not (is_alike(tensor, copy) and _is_equal(tensor, copy))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Also in its NaNs. Versions do not tell: batch norm writes to its statistics without raising them."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    try:
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    except UNREADABLE:  # numbers that torch stores and does not compare
        return False


@_as_plain
def _copy(tensor: Tensor) -> Tensor | None:
    """A copy of what a forward pass may write to; a parameter is for the optimizer alone."""
    if isinstance(tensor, (nn.Parameter, nn.parameter.UninitializedBuffer)):
        return None
    plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta"
    empty = plain and tensor.numel() and not tensor.untyped_storage().nbytes()  # sharded: its memory is elsewhere now
    return tensor.detach().clone() if plain and not empty else None
