"""What is done about a finding: raise, warn, or only keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torchhook._guard.findings import Finding
from torchhook._guard.word import Word
from torchhook.errors import GuardError, GuardWarning, warn

Warn = Callable[[str, type[Warning]], None]
Action = Literal["raise", "warn", "record"]


class Reports:
    """Tells the user of findings."""

    def __init__(self, action: Action, word: Word) -> None:
        self.raises = action == "raise"
        self._warns = action == "warn"
        self._word = word

    def __call__(self, finding: Finding) -> None:
        """Tell of a finding where it was made."""
        if self.raises:
            finding.note = self._word.leave(repr(finding))
            raise GuardError(finding)
        if self._warns and finding.times == 1:
            warn(str(finding), GuardWarning)

    def tell(self, found: list[tuple[Finding, Warn]]) -> None:
        """Tell of findings that were made in a repetition: a warning points to where."""
        for finding, warn_there in found:
            if self._warns and finding.times == 1:
                warn_there(str(finding), GuardWarning)
            elif self.raises:
                self(finding)

    def late(self, tell: Callable[[], None]) -> None:
        """Tell of what belongs to a call that is over: only as a warning."""
        try:
            tell()
        except GuardError as error:
            warn(f"in a call that ended with an error of its own: {error}", GuardWarning)
