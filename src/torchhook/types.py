"""What TorchHook's functions return and take, for annotations and ``isinstance``.

>>> from torchhook.types import Recording
>>> def norms(rec: Recording) -> list[float]: ...
"""

from torchhook._cam.api import CAM
from torchhook._capture import Stopped
from torchhook._classic.api import FeatureList
from torchhook._clip import GradientClip
from torchhook._core.session import Session
from torchhook._extract.api import Estimate, ImageFolder
from torchhook._features.api import Column, FeatureDataset, Features, TokenLoader, Tokens
from torchhook._features.api import Report as StoreReport
from torchhook._guard.api import Finding, Guard
from torchhook._layers.api import Layer, Layers, Op, Ops
from torchhook._recording.address import Site
from torchhook._recording.differences import Diff
from torchhook._recording.differences import Row as DiffRow
from torchhook._recording.lenses import Lens
from torchhook._recording.records import Record, Recording
from torchhook._recording.statistics import SiteStatistics, Statistics
from torchhook._recording.sweeps import Sweep
from torchhook._recording.tables import Table
from torchhook._report.api import PagePath
from torchhook._roles.api import Roles
from torchhook._stream.api import TokenStream
from torchhook._values.loaded import Loaded, Opaque
from torchhook._watch.api import Alarm, Alarms, Snapshot, Watch
from torchhook.edits import EditSite

__all__ = [
    "CAM",
    "Alarm",
    "Alarms",
    "Column",
    "Diff",
    "DiffRow",
    "EditSite",
    "Estimate",
    "FeatureDataset",
    "FeatureList",
    "Features",
    "Finding",
    "GradientClip",
    "Guard",
    "ImageFolder",
    "Layer",
    "Layers",
    "Lens",
    "Loaded",
    "Op",
    "Opaque",
    "Ops",
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
    "StoreReport",
    "Sweep",
    "Table",
    "TokenLoader",
    "TokenStream",
    "Tokens",
    "Watch",
]
