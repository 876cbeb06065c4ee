"""How a session shows itself, and what it says to those who read it like its recording."""

from __future__ import annotations

from typing import Any, NoReturn

from torchhook._core.hooks import Attachment
from torchhook._core.wiring import Taps
from torchhook._recording.records import Recording
from torchhook._words import counted
from torchhook.errors import SessionError


class Shown:
    """In one line; in a notebook with its sites."""

    recording: Recording
    _taps: Taps
    _attachment: Attachment | None
    _closed: bool
    _opened_as = "th.capture(…) as rec"  # what a user writes behind "with"

    @property
    def is_open(self) -> bool:
        """Whether its hooks are on the model now."""
        return self._attachment is not None and not self._closed

    def __repr__(self) -> str:
        state = "not open yet" if self._attachment is None else "open" if self.is_open else "closed"
        return f"<session on {self.recording.model_name}: {counted(len(self._taps.targets), 'site')}, {state}>"

    def _repr_html_(self) -> str:
        return self._taps.table(repr(self)[1:-1])._repr_html_()

    def __getitem__(self, key: Any) -> NoReturn:
        raise SessionError(self._not_a_recording(f"[{key!r}]"))

    # Only asked for what is not there: the names of a recording get an answer, any others the usual one.
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Recording, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise SessionError(self._not_a_recording(f".{name}"))

    def _not_a_recording(self, asked: str) -> str:
        line, name = f"'with {self._opened_as}:'", self._opened_as.rpartition(" ")[2]
        if self._attachment is None:
            return (
                f"this session was never opened, so there is no recording to read {name}{asked} from. Write {line} and "
                "call the model inside the block, or open() it first."
            )
        return f"this is the session; its recording is session.recording{asked}, or {name} of {line}."
