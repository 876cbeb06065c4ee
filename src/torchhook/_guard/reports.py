"""What is done about a finding: raise, warn, or only keep it; and how, where the model raises something itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torchhook._guard.findings import Finding
from torchhook._guard.word import Word
from torchhook.errors import GuardError, GuardWarning, UsersLine, hint, warn

Action = Literal["raise", "warn", "record"]


class Reports:
    """Tells the user of findings."""

    def __init__(self, action: Action, word: Word) -> None:
        self.raises = action == "raise"
        self._warns = action == "warn"
        self._word = word
        self._held: tuple[BaseException, Finding] | None = None

    def __call__(self, finding: Finding) -> None:
        """Tell of a finding where it was made."""
        if self.raises:
            finding.note = self._word.leave(repr(finding))
            raise GuardError(finding)
        if self._warns and finding.times == 1:
            warn(str(finding), GuardWarning)

    def tell(self, found: list[tuple[Finding, UsersLine]]) -> None:
        """Tell of findings that were made in a repetition: a warning points to where."""
        for finding, line in found:
            if self._warns and finding.times == 1:
                line.warn(str(finding), GuardWarning)
            elif self.raises:
                self(finding)

    def during(self, error: BaseException | None, tell: Callable[[], None]) -> None:
        """Tell while an ``error`` of the model's own goes through its hooks: torch lets no other out of them."""
        if error is None:
            tell()
            return
        try:
            tell()
        except GuardError as found:
            self._held = error, found.finding
            hint(error, f"before this, the guard found: {found.finding!r}")

    def raise_held(self, error: BaseException | None) -> None:
        """Raise what could not be raised, once the block has ended with that error."""
        held, self._held = self._held, None
        if held is not None and held[0] is error:
            raise GuardError(held[1]) from error
