"""Statistics while training: ``watch``."""

from torchhook.errors import TrainingWarning
from torchhook.watch.alarms import Alarm, Alarms
from torchhook.watch.engine import Snapshot
from torchhook.watch.statistics import DEFAULT, STATISTICS, Histogram
from torchhook.watch.watcher import Watch, watch

__all__ = ["DEFAULT", "STATISTICS", "Alarm", "Alarms", "Histogram", "Snapshot", "TrainingWarning", "Watch", "watch"]
