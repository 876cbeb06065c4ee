"""See, keep and change everything that flows through a PyTorch model."""

from torchhook import edits, errors, plot, transforms
from torchhook._attention import attention, rollout
from torchhook._cam.api import cam
from torchhook._capture import Stopped, capture, edit, run
from torchhook._classic.feature_layers import FeatureExtractor, FeatureLayer, FeatureLayers, get_layer_candidates
from torchhook._classic.gradient_clipper import gradient_clipper
from torchhook._classic.hook import Hook
from torchhook._classic.hook_manager import HookManager
from torchhook._classic.model_summary import count_parameters, model_summary
from torchhook._classic.verbose_execution import VerboseExecution
from torchhook._clip import clip_gradients
from torchhook._core.session import Session
from torchhook._diff import diff
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._guard.api import guard
from torchhook._layers import layers, ops
from torchhook._recording.address import Site
from torchhook._recording.records import Recording, load
from torchhook._report.api import report
from torchhook._sweep import sweep
from torchhook._values.tree import Inputs
from torchhook._version import __version__
from torchhook._watch.api import watch

__all__ = [
    "FeatureExtractor",
    "FeatureLayer",
    "FeatureLayers",
    "Hook",
    "HookManager",
    "Inputs",
    "Recording",
    "Session",
    "Site",
    "Stopped",
    "VerboseExecution",
    "__version__",
    "attention",
    "cam",
    "capture",
    "clip_gradients",
    "count_parameters",
    "diff",
    "edit",
    "edits",
    "errors",
    "extract",
    "get_layer_candidates",
    "gradient_clipper",
    "guard",
    "layers",
    "load",
    "model_summary",
    "open_features",
    "ops",
    "plot",
    "report",
    "rollout",
    "run",
    "sweep",
    "transforms",
    "watch",
]
