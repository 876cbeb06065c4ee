"""The first NaN or Inf, and the place that made it: ``guard``. Read ``watcher`` first, then ``judging``."""

from torchhook.errors import GuardError, GuardWarning
from torchhook.guard.door import Guard, guard
from torchhook.guard.findings import Finding, Statistics

__all__ = ["Finding", "Guard", "GuardError", "GuardWarning", "Statistics", "guard"]
