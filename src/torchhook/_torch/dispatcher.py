"""Calls of single operations, as torch's dispatcher tells of them; what else is called meanwhile costs nothing more.

A mode is asked about every function of torch. Here a dispatch key that torch keeps for its own tests is switched on in
one thread instead: operators pass over it, but for those that have a kernel there, which has whoever listens make the
call. The kernels are put in place once for the process; while the key is off, as it is but while somebody listens, they
are never reached.

Only what nothing else inside of torch calls can be told so: one call is then one that a model makes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook._torch.finding import find

Called = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call, as ``__torch_function__`` does, and returns what that returns."""
_UNKNOWN = (None,)  # the classes of its arguments, for which nobody asks here

ATTENTION = "scaled_dot_product_attention"
OPERATIONS: frozenset[str] = frozenset({ATTENTION})
"""The operations that the dispatcher tells of."""
# Torch's own, whatever somebody may have put in its place in ``torch.nn.functional``.
_attention: Callable[..., Tensor] = find("_C._nn.scaled_dot_product_attention", F.scaled_dot_product_attention)
# A function that modes hear of, and of nothing that it calls.
_MULTI_HEAD = F.multi_head_attention_forward.__code__

_UNUSED = "TESTING_ONLY_GenericMode"
_switch: Callable[[Any, bool], None] = find("_C._dispatch_tls_set_dispatch_key_included", lambda key, on: None)
_is_on: Callable[[Any], bool] = find("_C._dispatch_tls_is_dispatch_key_included", lambda key: False)
_key_named: Callable[[str], Any] = find("_C._parse_dispatch_key", lambda name: None)


class _Told(threading.local):
    """Who makes the calls in a thread."""

    called: Called | None = None


_told = _Told()
_key: Any = None
_kernels: list[Any] = []
"""The libraries that hold the kernels: they go with them."""


def turn_on(called: Called) -> None:
    """Have ``called`` make the calls of ``OPERATIONS`` in this thread, where ``can_tell``."""
    _told.called = called
    _switch(_key, True)


def turn_off() -> None:
    """Tell nobody any more."""
    if _key is not None and _is_on(_key):
        _switch(_key, False)


def can_tell(names: Set[str]) -> bool:
    """Whether the dispatcher tells of all calls of some operations."""
    # A causal bias has kernels called that are not the operation; importing it takes seconds, and few models do.
    return names <= OPERATIONS and "torch.nn.attention.bias" not in sys.modules and _is_in_place()


@functools.lru_cache(maxsize=1)
def _is_in_place() -> bool:
    """Put the kernels in place, and try them: in a thread of its own, where nothing is on."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_works).result()


def _works() -> bool:
    global _key
    calls = list[Any]()

    def noting(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(output := function(*args, **kwargs))
        return output

    try:
        _key = _key_named(_UNUSED)
        if _key is None or _is_on(_key):
            return False
        _put_kernels()
        x = torch.ones(1, 1, 2, 2, device="cpu")
        untold = F.scaled_dot_product_attention(x, x, x)
        turn_on(noting)
        try:
            told = F.scaled_dot_product_attention(x, x, 2 * x.relu(), is_causal=True)
        finally:
            turn_off()
        again = F.scaled_dot_product_attention(x, x, x)
        return bool(len(calls) == 1 and told is calls[0] and (told == 2).all() and (untold == again).all())
    except Exception:  # whatever a later torch makes of it: then a mode hears of the calls
        return False


def _put_kernels() -> None:
    everywhere, operators = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kernels[:] = everywhere, operators
    everywhere.fallback(torch.library.fallthrough_kernel, _UNUSED)
    operators.impl(ATTENTION, _tell, _UNUSED)


def _tell(*args: Any, **kwargs: Any) -> Any:
    called = _told.called
    _switch(_key, False)
    try:
        # Autograd's threads have the key on too, where it was on for whoever asked for gradients.
        if called is None or sys._getframe(1).f_code is _MULTI_HEAD:
            return _attention(*args, **kwargs)
        return called(_attention, _UNKNOWN, args, kwargs)
    finally:
        _switch(_key, True)
