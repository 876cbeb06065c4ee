"""What TorchHook's functions return and take, for annotations and ``isinstance``.

>>> from torchhook.types import Recording
>>> def norms(rec: Recording) -> list[float]: ...
"""

from torchhook._cam.api import CAM
from torchhook._capture import Stopped
from torchhook._clip import GradientClip
from torchhook._core.session import Session
from torchhook._extract.api import Estimate, ImageFolder
from torchhook._features.api import Features, TokenLoader, Tokens
from torchhook._guard.api import Finding, Guard
from torchhook._recording.address import Site
from torchhook._recording.differences import Diff
from torchhook._recording.lenses import Lens
from torchhook._recording.records import Record, Recording
from torchhook._recording.statistics import SiteStatistics, Statistics
from torchhook._recording.sweeps import Sweep
from torchhook._report.api import PagePath
from torchhook._roles.api import Roles
from torchhook._stream import TokenStream
from torchhook._watch.api import Alarm, Alarms, Snapshot, Watch

__all__ = [
    "CAM",
    "Alarm",
    "Alarms",
    "Diff",
    "Estimate",
    "Features",
    "Finding",
    "GradientClip",
    "Guard",
    "ImageFolder",
    "Lens",
    "PagePath",
    "Record",
    "Recording",
    "Roles",
    "Session",
    "Site",
    "SiteStatistics",
    "Snapshot",
    "Statistics",
    "Stopped",
    "Sweep",
    "TokenLoader",
    "TokenStream",
    "Tokens",
    "Watch",
]
