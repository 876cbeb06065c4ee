"""See, keep and change everything that flows through a PyTorch model."""

from torchhook import edits, errors, plot, transforms
from torchhook._version import __version__
from torchhook.attention import attention, rollout
from torchhook.cam import cam
from torchhook.capture import Stopped, capture, edit, run
from torchhook.classic import (
    Hook,
    HookManager,
    VerboseExecution,
    count_parameters,
    gradient_clipper,
    model_summary,
)
from torchhook.clip import clip_gradients
from torchhook.diff import diff
from torchhook.extract import extract, open_features
from torchhook.featured import FeatureExtractor, FeatureLayer, FeatureLayers, get_layer_candidates
from torchhook.guard import guard
from torchhook.layers import layers, ops
from torchhook.records import Recording, load
from torchhook.report import report
from torchhook.session import Session
from torchhook.sites import Site
from torchhook.sweep import sweep
from torchhook.tree import Inputs
from torchhook.watch import watch

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
