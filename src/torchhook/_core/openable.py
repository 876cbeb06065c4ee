"""The life of a tool: inert until ``with`` or ``open``, closed for good by the end of the block or ``close``."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from torchhook.errors import SessionError, later_warning, never_opened

Self = TypeVar("Self", bound="Openable")


class Handed(Protocol):
    """What a user got, and has to open."""

    @property
    def unopened(self) -> str:
        """What it is called, as long as it was never opened; empty from then on."""


# No WeakKeyDictionary: this is done whenever a tool is made, and setting an item of one takes longer than all of it.
_handed: dict[weakref.ref[Handed], Callable[[str, type[Warning]], None]] = {}
_forget = _handed.pop


def remember(tool: Handed) -> None:
    """Have it said when the program ends that something was never opened, at the line that made it."""
    _handed[weakref.ref(tool, _forget)] = later_warning(3)


# What a module's own names hold is dropped while the interpreter shuts down, too late for a warning.
@atexit.register
def _say_unopened() -> None:
    for ref, warn_there in list(_handed.items()):
        tool = ref()
        if tool is not None and tool.unopened:
            never_opened(tool.unopened, "was never opened", warn_there)


class Openable:
    """Opens once and closes once. A subclass says what happens then, in ``_start`` and ``_stop``."""

    _kind = "tool"
    """What it is called in errors and warnings."""
    _life: Literal["unmade", "made", "open", "closed"] = "unmade"

    def _made(self) -> None:
        """To be called when nothing can fail any more: who could not be made has not been forgotten either."""
        self._life = "made"
        remember(self)

    @property
    def unopened(self) -> str:
        """What it is called, as long as it was never opened; empty from then on."""
        return f"a {self._kind}" if self._life == "made" else ""

    @property
    def is_open(self) -> bool:
        return self._life == "open"

    @property
    def _state(self) -> str:
        """Where it stands, in words."""
        return "not open yet" if self._life in ("unmade", "made") else self._life

    def open(self: Self) -> Self:
        """Begin, until ``close``."""
        if self._life != "made":
            now = "is open already" if self._life == "open" else "was closed"
            raise SessionError(f"a {self._kind} opens once, and this one {now}. Make a new one: they are cheap.")
        # Until it has started: after an opening that failed, there is nothing to close and nothing to open again.
        self._life = "closed"
        self._start()
        self._life = "open"
        return self

    def close(self) -> None:
        """End, and take every hook away. Closing twice does nothing."""
        self._close(None)

    remove = close
    """As PyTorch's own hook handles call it."""

    def __enter__(self: Self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        # Not so if it was never opened: who closes such a thing believes that it worked, and is to be told.
        if self._life == "open":
            self._life = "closed"
            self._stop(error)

    def _needs_opening(self, what: str) -> None:
        """Refuse what makes no sense before ``open``."""
        if self._life == "made":
            raise SessionError(
                f"{what}: this {self._kind} is not open yet, so there is nothing to say. Use it in a with block, "
                "or call open() first and close() at the end."
            )

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self, error: BaseException | None) -> None:
        """``error`` is the one that ended the block."""
        raise NotImplementedError

    # On the class, because the names of a module may be gone while the interpreter shuts down; what is dropped by that
    # was spoken of at exit.
    _is_shutting_down = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        if self._life == "made" and not self._is_shutting_down():
            never_opened(self.unopened)
