"""Hooks of modules, put where PyTorch puts them: a capture puts on and takes off one for each site, each time.

``register_forward_hook`` makes a handle with weak references, which costs more than the hook.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import length_hint
from sys import getrefcount
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]
Undo = list[Callable[[], object] | tuple[dict[Any, Any], Any]]
"""What takes away what was put on, in the order of putting it on; of a hook, where it is and its key there."""

# A class that registers in a way of its own is asked to.
_AFTER, _BEFORE = nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook


def _works() -> bool:
    """Whether hooks are still kept as they are here, found out by putting some on."""
    module, called, undo = nn.Identity(), list[Any](), Undo()
    try:
        _put(undo, module._forward_hooks, lambda *call: called.append(call[1:]))
        _put(
            undo,
            module._forward_pre_hooks,
            lambda *call: called.append(call[1:]),
            module._forward_pre_hooks_with_kwargs,
        )
        module(1)
        for last in undo:
            take_away(last)
        module(2)
        works = called == [((1,), {}), ((1,), 1)] and _works_when_raised() and _works_on_leaves()
    except Exception:  # whatever a later torch makes of it
        return False
    return works


class _Raises(nn.Module):
    def forward(self) -> None:
        raise ValueError


def _works_when_raised() -> bool:
    module, called, undo = _Raises(), list[int](), Undo()
    module.register_forward_hook(lambda *call: called.append(0), always_call=True)
    for number in (1, 2):
        hooks: Any = module._forward_hooks
        key = _put(undo, hooks, lambda *call, at=number: called.append(at), module._forward_hooks_always_called)
        hooks.move_to_end(key, last=False)
    with contextlib.suppress(ValueError):
        module()
    for last in undo:
        take_away(last)
    with contextlib.suppress(ValueError):
        module()
    return called == [2, 1, 0, 0]


def _works_on_leaves() -> bool:
    leaf, found, undo = torch.ones(1, requires_grad=True), list[float](), Undo()
    leaf.register_hook(lambda grad: None).remove()
    hooks: Any = leaf._backward_hooks
    _put(undo, hooks, lambda grad: found.append(float(grad)))
    (leaf * 2).sum().backward()
    take_away(undo[0])
    (leaf * 3).sum().backward()
    return found == [2.0]


_keys: Iterator[int] = iter(())
"""Keys that torch gives to nobody else. Many are taken at once: to change a class, for each hook, is slow."""


def _more_keys() -> int:
    global _keys
    first = RemovableHandle.next_id
    RemovableHandle.next_id = first + 1000
    _keys = iter(range(first + 1, first + 1000))
    return first


def _put(undo: Undo, hooks: dict[int, Any], hook: Hook, marks: dict[int, bool] | None = None) -> int:
    key = next(_keys, None) or _more_keys()
    # Known before it is there: an interrupt may come between any two lines.
    if marks is not None:
        undo.append((marks, key))
        marks[key] = True
    undo.append((hooks, key))
    hooks[key] = hook
    return key


def take_away(last: Callable[[], object] | tuple[dict[Any, Any], Any]) -> None:
    """Undo one thing. Twice does no harm."""
    if type(last) is tuple:
        last[0].pop(last[1], None)
    else:
        last()  # type: ignore[operator]


def put_after(undo: Undo, module: nn.Module, hook: Hook) -> None:
    """Call ``hook(module, args, output)`` after the module ran."""
    if is_direct and type(module).register_forward_hook is _AFTER:
        # As in _put, without the call.
        key = next(_keys, None) or _more_keys()
        undo.append((hooks := module._forward_hooks, key))
        hooks[key] = hook
    else:
        undo.append(module.register_forward_hook(hook).remove)  # on one line: what is set is known


def put_always(undo: Undo, module: nn.Module, hook: Hook, first: bool) -> None:
    """Call ``hook(module, args, output)`` after the module ran or raised, before all other hooks or after them."""
    if is_direct and type(module).register_forward_hook is _AFTER:
        hooks: Any = module._forward_hooks
        key = _put(undo, hooks, hook, module._forward_hooks_always_called)
        if first:
            hooks.move_to_end(key, last=False)
    else:
        # On one line: what is set is known.
        undo.append(module.register_forward_hook(hook, prepend=first, always_call=True).remove)


def _take_all_away(where: Iterable[dict[int, Any]], keys: Iterable[int]) -> None:
    # An interrupt may have left a key without its place. And strict= takes longer than a hook to be taken away.
    for hooks, key in zip(where, keys):  # noqa: B905
        hooks.pop(key, None)


def put_around(undo: Undo, root: nn.Module, before: Hook, modules: Iterable[nn.Module], behind: Iterable[Hook]) -> None:
    """As ``put_before`` for a model and ``put_after`` for some modules, without a call and an object for each."""
    where: list[dict[int, Any]] = []  # no list[…](), which takes as long as a hook
    keys: list[int] = []
    undo.append(partial(_take_all_away, where, keys))
    if is_direct and type(root).register_forward_pre_hook is _BEFORE:
        key = next(_keys, None) or _more_keys()
        keys += key, key
        marks, hooks = root._forward_pre_hooks_with_kwargs, root._forward_pre_hooks
        where += marks, hooks
        marks[key] = True
        hooks[key] = before
    else:
        undo.append(root.register_forward_pre_hook(before, with_kwargs=True).remove)
    for module, hook in zip(modules, behind):  # noqa: B905 (as many: strict= takes as long as a hook)
        if is_direct and type(module).register_forward_hook is _AFTER:
            # Known before it is there: an interrupt may come between any two lines.
            keys.append(key := next(_keys, None) or _more_keys())
            where.append(hooks := module._forward_hooks)
            hooks[key] = hook
        else:
            undo.append(module.register_forward_hook(hook).remove)


def put_between(undo: Undo, before: Hook, modules: Iterable[nn.Module], behind: Hook) -> None:
    """As ``put_before`` without keywords and ``put_always`` as the first, for each module, without the calls."""
    where: list[dict[int, Any]] = []
    keys: list[int] = []
    undo.append(partial(_take_all_away, where, keys))
    for module in modules:
        kind = type(module)
        if is_direct and kind.register_forward_pre_hook is _BEFORE and kind.register_forward_hook is _AFTER:
            key, after = next(_keys, None) or _more_keys(), next(_keys, None) or _more_keys()
            first, marks, hooks = module._forward_pre_hooks, module._forward_hooks_always_called, module._forward_hooks
            # Known before they are there: an interrupt may come between any two lines.
            keys += key, after, after
            where += first, marks, hooks
            first[key] = before
            marks[after] = True
            hooks[after] = behind
            hooks.move_to_end(after, last=False)  # type: ignore[attr-defined]
        else:
            put_before(undo, module, before, kwargs=False)
            put_always(undo, module, behind, first=True)


def put_on_leaf(undo: Undo, leaf: Tensor, hook: Hook) -> None:
    """Call ``hook(gradient)`` when the gradient of a tensor that no step has made is there."""
    # Made by the first hook that is registered, and looked into for each gradient from then on.
    hooks = getattr(leaf, "_backward_hooks", None)
    is_plain = leaf.grad_fn is None and type(leaf) in (Tensor, nn.Parameter)
    if is_direct and is_plain and type(hooks) is OrderedDict:
        key = next(_keys, None) or _more_keys()
        undo.append((hooks, key))
        hooks[key] = hook
    else:
        undo.append(leaf.register_hook(hook).remove)


def put_before(undo: Undo, module: nn.Module, hook: Hook, kwargs: bool = True) -> None:
    """Call ``hook(module, args, kwargs)`` before the module runs, or ``hook(module, args)``."""
    if is_direct and type(module).register_forward_pre_hook is _BEFORE:
        key = next(_keys, None) or _more_keys()
        if kwargs:
            undo.append((marks := module._forward_pre_hooks_with_kwargs, key))
            marks[key] = True
        undo.append((hooks := module._forward_pre_hooks, key))
        hooks[key] = hook
    else:
        undo.append(module.register_forward_pre_hook(hook, with_kwargs=kwargs).remove)


def remove_copied(model: nn.Module) -> None:
    """Take away what stands for taps in a model that was copied or unpickled with them on.

    It does nothing; but whoever copied counts it among the hooks, and the compiler of torch 2.6 does not follow it.
    """
    inert = contextlib.nullcontext.__exit__
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # it takes none
            continue
        after: Any = (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
        before: Any = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        for hooks, *marks in (after, before):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__func__", None) is inert]:
                for held in (hooks, *marks):
                    held.pop(key, None)


def registered_anywhere() -> int:
    """How many hooks were registered in this process, on anything."""
    return RemovableHandle.next_id - length_hint(_keys)  # less those that were only set aside


# -- results of steps of the graph ----------------------------------------------------------------------


def put_on_newest(tensor: Tensor, hook: Any) -> bool | None:
    """Call ``hook(gradient)`` for what the newest step has made, which is no view: nobody can have used it yet.

    ``False`` where somebody has put one on already, ``None`` where it is nothing of this kind. Without a handle, and
    without counting as registered: one comes and goes for every layer. ``hook.where`` is told of the dict that holds
    it, which goes with the graph, and whose key it is.
    """
    made: Any = tensor.grad_fn
    if made is None or tensor._base is not None or made._sequence_nr() + 1 != _next_step():
        return None
    if tensor._backward_hooks is not None:
        return False
    hooks: Any = OrderedDict()
    tensor._backward_hooks = hooks
    made._register_hook_dict(tensor)
    hook.where = ref(hooks)
    hooks[hook] = hook  # torch's keys are numbers
    return True


def is_on(tensor: Tensor, hook: Any) -> bool:
    """Whether a hook that was put on the newest is on this very tensor."""
    hooks: Any = tensor._backward_hooks
    return hooks is not None and hook in hooks


def first_on(tensor: Tensor) -> Any:
    """The first hook on a tensor, if there is one."""
    hooks = getattr(tensor, "_backward_hooks", None)
    return next(iter(hooks.values()), None) if hooks else None


class _Noting:
    """A hook that notes."""

    def __init__(self, found: list[float]) -> None:
        self.found, self.where = found, lambda: None

    def __call__(self, grad: Tensor) -> None:
        self.found.append(float(grad))


def _works_on_results() -> bool:
    leaf, found = torch.ones(1, requires_grad=True), list[float]()
    hook: Any = _Noting(found)
    try:
        older = leaf * 2
        result = older * 3
        once = put_on_newest(result, hook) and put_on_newest(result, _Noting(found)) is False
        others = [put_on_newest(other, _Noting(found)) for other in (older, leaf, result[:])]
        known = first_on(result) is hook and is_on(result, hook) and not is_on(older, hook)
        (result * 4).sum().backward(retain_graph=True)
        hook.where().pop(hook)
        (result * 5).sum().backward()
        return bool(once) and known and others == [None] * 3 and found == [4.0]
    except Exception:  # whatever a later torch makes of it
        return False


_next_step: Callable[[], int] = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", lambda: 0)
is_direct = _works()
knows_results = _works_on_results()
"""Whether ``put_on_newest`` and ``is_on`` do what they say."""


# -- who holds a value ---------------------------------------------------------------------------------


class _Makes(nn.Module):
    """Returns a value that nobody else holds, or one that it holds itself."""

    def forward(self, hold: bool) -> Tensor:
        value = torch.ones(2)
        self.held = value if hold else None
        return value


class _Counts:
    """A hook as taps are: an object, called with the value as its last argument."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.found = getrefcount(output)


def _references_in_hook(hold: bool) -> int:
    module, hook = _Makes(), _Counts()
    module.register_forward_hook(hook)
    module(hold)
    return hook.found


def _references_of_base(view: Tensor) -> int:
    base: Any = view._base
    return int(getrefcount(base) + base._use_count())


def _references_of_part(parts: tuple[Tensor]) -> int:
    for part in parts:
        found = getrefcount(part)
    return found


# Asked one by one: torch 2.6 has no function yet that asks all of them.
_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


def _counted(count: Callable[[bool], int]) -> int:
    """The references to a value that nobody else holds; -1 where one that is held would not have one more."""
    try:
        if any(getattr(nn.modules.module, name) for name in _GLOBAL):  # they may hold what passes, now and not later
            return -1
        made, held = count(False), count(True)
    except Exception:  # whatever a later torch or Python makes of it
        return -1
    return made if held == made + 1 else -1


def _of_base(hold: bool) -> int:
    held = torch.ones(2)
    return _references_of_base(held.view(2, 1) if hold else torch.ones(2).view(2, 1))


def _of_part(hold: bool) -> int:
    held = torch.ones(2)
    return _references_of_part((held,) if hold else (torch.ones(2),))


def _of_name(hold: bool) -> int:
    held = torch.ones(2) if hold else None
    value = torch.ones(2) if held is None else held
    return getrefcount(value)


held_by_call = _counted(_references_in_hook)
"""How many references a hook finds to its value when only the running call holds it: then the call has made it."""
held_by_view = _counted(_of_base)
"""How many a function finds to what a tensor is a view of, with those inside of torch, when only the view holds it."""
held_by_tuple = _counted(_of_part)
"""How many a loop finds to a part of a tuple, when only the tuple holds that."""
held_by_name = _counted(_of_name)
"""How many a function finds to what another has just returned, when nobody else holds it."""
