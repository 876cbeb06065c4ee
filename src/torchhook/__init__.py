"""See, keep and change everything that flows through a PyTorch model."""

from torchhook import edits
from torchhook._version import __version__
from torchhook.capture import Stopped, capture, edit, run
from torchhook.classic import (
    FeatureExtractor,
    FeatureLayer,
    FeatureLayers,
    Hook,
    HookManager,
    VerboseExecution,
    count_parameters,
    get_layer_candidates,
    gradient_clipper,
    model_summary,
)
from torchhook.clip import clip_gradients
from torchhook.layers import layers, ops
from torchhook.records import Recording, load
from torchhook.session import Session
from torchhook.sites import Site
from torchhook.tree import Inputs

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
    "capture",
    "clip_gradients",
    "count_parameters",
    "edit",
    "edits",
    "get_layer_candidates",
    "gradient_clipper",
    "layers",
    "load",
    "model_summary",
    "ops",
    "run",
]
