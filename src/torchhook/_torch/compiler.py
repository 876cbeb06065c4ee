"""Torch's compiler: its private names, each with what is done where it is gone, and what is asked of it everywhere."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from torchhook import errors
from torchhook.errors import TorchVersionError

in_trace: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether the compiler follows the code that runs: then little of Python can be used."""

# Where torch cannot tell (2.6), whatever is compiled: that version follows no class of ours either.
_public: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def _flag() -> bool:
    return torch.compiler._is_exporting_flag


# Of whatever it follows, the compiler of torch 2.11 and older says that it is exported; the flag it only reads.
is_exporting: Callable[[], bool] = _flag if hasattr(torch.compiler, "_is_exporting_flag") else _public
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
    # As compiler_is_loaded, without the call: this is asked whenever a session is made, and when it opens.
    return in_trace() or ("torch._dynamo" in sys.modules and _frame_callback() is not None)


# -- what is said while the compiler follows -------------------------------------------------------------


def refused(kind: type[Exception], message: str) -> Exception:
    """The error to be raised. While the compiler follows the code, it is raised here, in words of our own.

    What the code that it follows raises, the compiler puts behind a page of its own under ``fullgraph=True``.
    """
    if in_trace():
        _refuse_to_be_followed(kind.__name__, message)
    return kind(message)


def _refuse_to_be_followed(kind: str, message: str) -> None:
    ours = getattr(errors, kind)
    # As one of the compiler's own: without fullgraph=True it goes on without compiling this, and comes here no more.
    theirs = getattr(sys.modules.get("torch._dynamo.exc"), "Unsupported", None)
    if theirs is None:
        raise ours(message)
    members = {"__module__": ours.__module__, "__init__": theirs.__init__}
    raise type(kind, (ours, theirs), members)(message)


# As torch.compiler.assume_constant_result does, which imports the compiler: called while it follows, and not followed.
_refuse_to_be_followed._dynamo_marked_constant = True  # type: ignore[attr-defined]

_SKIPS_HOOKS = "skip_nnmodule_hook_guards"


def hook_guards() -> str:
    """How to have compiled code see whether a module has hooks, as the end of a sentence; nothing where torch has no
    such setting."""
    if not hasattr(sys.modules.get("torch._dynamo.config"), _SKIPS_HOOKS):
        return ""
    return f", or set torch._dynamo.config.{_SKIPS_HOOKS} = False before anything is compiled"


hook_guards._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- compiled modules -------------------------------------------------------------------------------

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that was compiled in place."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` returned, or was compiled in place, or its ``forward`` was."""
    # By its name: importing the compiler only to ask would take seconds.
    if type(module).__name__ == "OptimizedModule" or getattr(module, COMPILED_CALL, None) is not None:
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def after_compiled_call(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Have ``change`` made to what a module that was compiled in place returns."""
    compiled = getattr(module, COMPILED_CALL, None)
    if compiled is None:
        raise TorchVersionError(
            f"torch {torch.__version__} has no Module.{COMPILED_CALL}, which TorchHook needs to copy features out of "
            "CUDA graphs. Compile without them, or use a version of torch that docs/compatibility.md names."
        )
    setattr(module, COMPILED_CALL, lambda *args, **kwargs: change(compiled(*args, **kwargs)))


# -- what is done with compiled code ------------------------------------------------------------------


_PATIENCE = 60.0  # seconds: what is compiled might wait for the one who waits for it


def wait_for_compiling() -> None:
    """Return when no other thread is compiling, or after a minute."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if hasattr(lock, "acquire") and lock.acquire(timeout=_PATIENCE):
        lock.release()


_FRAMES = "torch._dynamo.eval_frame"


def runs_compiled_code() -> bool:
    """Whether a compiled model that is called here runs its compiled code, and compiles what is not compiled yet."""
    stance = getattr(getattr(sys.modules.get(_FRAMES), "_stance", None), "stance", "default")
    return "eager" not in str(stance)


def _nowhere() -> str | None:
    """No session is open."""
    return None


class _Stance:
    """Stands for torch's record of what is done with compiled code, which is one for all threads.

    Torch reads it several times for one decision, and once more when a compiled call returns. A session that another
    thread closes meanwhile must not change the answer in between: a call goes on as it began.
    """

    def __init__(self, before: Any) -> None:
        self.before, self.here = before, _nowhere
        self.was_asked = False
        self._begun = threading.local()

    @property
    def stance(self) -> str:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") != _FRAMES:
            return self._now()
        # By the number of the frame, and where in it: to hold the frame would keep alive what its callers hold. One
        # that has the number of another begins before that one's place.
        known: dict[int, tuple[CodeType, int, str]] = self._begun.__dict__.setdefault("known", {})
        code, place, answer = known.get(id(frame), (None, 0, ""))
        if code is not frame.f_code or frame.f_lasti <= place:
            self.was_asked = True
            answer = self._now()
            for one in (frame, frame.f_back):  # the decision, and the call for which it is made
                if one is not None:
                    known[id(one)] = one.f_code, one.f_lasti, answer
        return answer

    def _now(self) -> str:
        return self.here() or str(self.before.stance)

    def give_way(self) -> None:
        self.here = _nowhere  # from here on both give the same answers to whoever begins
        if self.was_asked and _in_compiled_calls():
            return  # who has begun is answered by this to the end; the next session takes it over
        frames: Any = sys.modules.get(_FRAMES)
        if frames._stance is self:  # and not one that a user has set since
            frames._stance = self.before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


_latest: _Stance | None = None
"""The one that stood there last: taken again if nobody has asked it, since one is needed whenever a session opens."""


def take_stance(here: Callable[[], str | None]) -> Callable[[], None]:
    """Have compiled code run as ``here()`` says at each call (``None``: as before), until what is returned is called.

    Where torch keeps its stance in another way, it is eager in all threads.
    """
    global _latest
    frames: Any = sys.modules.get(_FRAMES)
    before = getattr(frames, "_stance", None)
    if not hasattr(before, "stance"):
        stance = torch.compiler.set_stance("force_eager")
        return lambda: stance.__exit__(None, None, None)
    if isinstance(before, _Stance):
        mine = before
    elif (known := _latest) is not None and known.before is before and not known.was_asked:
        mine = known
    else:
        mine = _latest = _Stance(before)
    mine.here = here
    frames._stance = mine
    return mine.give_way


def _in_compiled_calls() -> bool:
    """Whether any thread decides what to do with compiled code, or runs some."""
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            if above.f_globals.get("__name__") == _FRAMES:
                return True
            above = above.f_back
    return False
