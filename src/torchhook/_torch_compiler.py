"""Torch's compiler: its private names, each with what is done where it is gone, and what is asked of it everywhere.

It belongs to ``_torch``, and stands beside it because files stay short.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook.errors import TorchVersionError

in_trace: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether the compiler follows the code that runs: then little of Python can be used."""

# Where torch cannot tell (2.6), whatever is compiled: that version follows no class of ours either.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""Whether ``torch.export`` follows the code that runs."""

follows_descriptors = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 9)
"""Whether ``torch.export`` can call a ``forward`` that a descriptor gives."""


# Found when this is imported: a function that names torch itself is followed by the compiler, which warns of this one.
_frame_callback: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "get_eval_frame_callback", lambda: None
)


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled. Importing the compiler only to ask would take seconds."""
    return "torch._dynamo" in sys.modules


def in_compiled_code() -> bool:
    """Whether the compiler follows the code that runs, or runs what it could not follow: it knows no new hooks."""
    return in_trace() or (compiler_is_loaded() and _frame_callback() is not None)


# -- compiled modules -------------------------------------------------------------------------------

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that was compiled in place."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` returned, or was compiled in place."""
    # By its name: importing the compiler only to ask would take seconds.
    return type(module).__name__ == "OptimizedModule" or getattr(module, COMPILED_CALL, None) is not None


def after_compiled_call(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Have ``change`` made to what a module that was compiled in place returns."""
    compiled = getattr(module, COMPILED_CALL, None)
    if compiled is None:
        raise TorchVersionError(
            f"torch {torch.__version__} has no Module.{COMPILED_CALL}, which TorchHook needs to copy features out of "
            "CUDA graphs. Compile without them, or use a version of torch that the README names."
        )
    setattr(module, COMPILED_CALL, lambda *args, **kwargs: change(compiled(*args, **kwargs)))


# -- what is done with compiled code ------------------------------------------------------------------


_PATIENCE = 60.0  # seconds: what is compiled might wait for the one who waits for it


def wait_for_compiling() -> None:
    """Return when no other thread is compiling, or after a minute."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if hasattr(lock, "acquire") and lock.acquire(timeout=_PATIENCE):
        lock.release()


class _Stance:
    """Stands for torch's record of what is done with compiled code, which is one for all threads."""

    def __init__(self, before: Any, here: Callable[[], str | None]) -> None:
        self.before, self.here = before, here

    @property
    def stance(self) -> str:
        return self.here() or str(self.before.stance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


def take_stance(here: Callable[[], str | None]) -> Callable[[], None]:
    """Have compiled code run as ``here()`` says at each call (``None``: as before), until what is returned is called.

    Where torch keeps its stance in another way, it is eager in all threads.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    before = getattr(frames, "_stance", None)
    if not hasattr(before, "stance"):
        stance = torch.compiler.set_stance("force_eager")
        return lambda: stance.__exit__(None, None, None)
    mine = _Stance(before, here)
    frames._stance = mine

    def restore() -> None:
        if frames._stance is mine:  # and not one that a user has set since
            frames._stance = before

    return restore
