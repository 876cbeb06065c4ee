"""The names that hook code has long been written with, in one place."""

from torchhook._classic.feature_layers import FeatureExtractor, FeatureLayer, FeatureLayers, get_layer_candidates
from torchhook._classic.feature_list import FeatureList
from torchhook._classic.gradient_clipper import gradient_clipper
from torchhook._classic.hook import Hook
from torchhook._classic.hook_manager import HookManager
from torchhook._classic.model_summary import count_parameters, model_summary
from torchhook._classic.verbose_execution import VerboseExecution

__all__ = [
    "FeatureExtractor",
    "FeatureLayer",
    "FeatureLayers",
    "FeatureList",
    "Hook",
    "HookManager",
    "VerboseExecution",
    "count_parameters",
    "get_layer_candidates",
    "gradient_clipper",
    "model_summary",
]
