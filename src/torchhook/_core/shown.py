"""How a session shows itself, and what it says to those who read it like its recording."""

from __future__ import annotations

from typing import Any, NoReturn

from torchhook._core.hooks import Attachment
from torchhook._core.wiring import Taps
from torchhook._recording.records import Recording
from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import SessionError


class _OfRecording:
    """Stands for what a recording has, and a session has not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, session: Shown | None, kind: type[Shown]) -> Any:
        if session is None:
            return self
        raise SessionError(session._not_a_recording(f".{self._name}"))


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
        taps = self._taps.targets
        rows = [[site.shown, "edited" if tap.edits else "read", str(tap.ran)] for site, (_, tap) in taps.items()]
        return Table(repr(self)[1:-1], ["site", "", ">calls"], rows)._repr_html_()

    def __getitem__(self, key: Any) -> NoReturn:
        raise SessionError(self._not_a_recording(f"[{key!r}]"))

    def _not_a_recording(self, asked: str) -> str:
        line, name = f"'with {self._opened_as}:'", self._opened_as.rpartition(" ")[2]
        if self._attachment is None:
            return (
                f"this session was never opened, so there is no recording to read {name}{asked} from. Write {line} and "
                "call the model inside the block, or open() it first."
            )
        return f"this is the session; its recording is session.recording{asked}, or {name} of {line}."


# No __getattr__: a class that has one is slower to ask for whatever it has, and a session is opened for each call.
for _name in vars(Recording):
    if not _name.startswith("_") and _name not in vars(Shown):
        setattr(Shown, _name, _OfRecording(_name))
