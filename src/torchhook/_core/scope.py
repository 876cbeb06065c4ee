"""Whose calls are seen: the identity of an open session, and the context (thread, asyncio task) that it belongs to."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torchhook._recording.tables import Table


class Scope:
    """The identity of one open session."""

    __slots__ = ("closed", "runs_eagerly", "stopped_at", "stops")

    def __init__(self) -> None:
        self.closed: bool = False
        self.runs_eagerly: bool = False
        """Whether nothing is compiled in this scope: then what is being compiled is none of its own."""
        self.stopped_at: str | None = None
        self.stops: int = 0
        """How often a pass was ended without its caller having heard of it."""

    def enter(self) -> None:
        """From here on, calls made in this context belong to this scope."""
        now = active.get()
        active.set(now | {self} if now else frozenset((self,)))

    def leave(self) -> None:
        # Not ContextVar.reset: sessions may overlap, and close in another context than they opened in.
        now = active.get()
        active.set(now - {self} if len(now) != 1 or self not in now else _NONE)


_NONE: frozenset[Scope] = frozenset()
active: contextvars.ContextVar[frozenset[Scope]] = contextvars.ContextVar("torchhook_active", default=_NONE)
"""The scopes that the running context belongs to."""


UNSEEN = Scope()
"""Among the scopes of a context in which sessions that were open before see nothing, and count nothing as missed; also
those that take calls from everywhere."""


class Repetition:
    """A run of a model that is made once more; of those who saw it the first time, it begins and ends no call."""

    def __init__(self, seen_by: frozenset[Scope]) -> None:
        self.seen_by = seen_by


repetition: contextvars.ContextVar[Repetition | None] = contextvars.ContextVar("torchhook_repetition", default=None)
"""The innermost one that runs in this context."""


def was_seen(scope: Scope) -> bool:
    """Whether what runs was seen by a session when it ran for the first time."""
    now = repetition.get()
    return now is not None and scope in now.seen_by


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What runs in this block is of no open session, however it came to run; those that are opened in it see it."""
    before = active.get()
    active.set(frozenset({UNSEEN}))
    try:
        yield
    finally:
        active.set(before)


class Stop(BaseException):
    """Ends a forward pass at the last needed site. Not an ``Exception``: models catch those."""

    def __init__(self, scope: Scope) -> None:
        super().__init__("a torchhook session with stop=True ended this forward pass")
        self.scope = scope


before_stop: list[Callable[[Any], None]] = []
"""Who is shown what the module returns at which a pass is stopped: hooks behind it are not called."""


def stop_pass(scope: Scope, returned: Any = None) -> NoReturn:
    """End the forward pass; ``returned`` is what a module has just given back, if it ends there."""
    for show in tuple(before_stop) if returned is not None else ():
        show(returned)
    scope.stops += 1
    raise Stop(scope)


@dataclasses.dataclass(frozen=True)
class Stopped:
    """Stands for the output of a forward pass that ``stop=True`` ended early."""

    at: str

    def __repr__(self) -> str:
        return f"<no output: the forward pass stopped at {self.at!r}>"

    def _repr_html_(self) -> str:
        return Table(f"no output: the forward pass stopped at {self.at!r}", [], [])._repr_html_()

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(f"the forward pass stopped at {self.at!r}, so the model has no output.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "at":  # while it is copied or unpickled
            raise AttributeError(name)
        raise AttributeError(f"no {name!r}: the forward pass stopped at {self.at!r}, so the model has no output.")
