"""See, keep and change everything that flows through a PyTorch model.

see what there is    layers, ops: modules and operations, with their addresses and shapes; roles: standard names
keep values          capture, run; load opens a recording that was saved
change values        edit; clip_gradients; sweep patches one site after the other; save_edits, load_edits
find what is wrong   guard: the first NaN; watch: statistics while training; diff: where two runs part
explain an output    attention, rollout, cam, lens; plot draws; report: all of it on one page
whole data sets      extract writes features to disk, open_features reads them; stream shuffles tokens; statistics
names of older code  HookManager, Hook, FeatureLayer, FeatureLayers, FeatureExtractor, VerboseExecution,
                     get_layer_candidates, gradient_clipper, count_parameters, model_summary

``edits`` and ``transforms`` are catalogues: what changes a value in the model, and what changes only what is kept.
``errors`` has everything that is raised, ``types`` what annotations and ``isinstance`` need. ``Inputs`` holds
positional and keyword arguments together, wherever a function takes ``inputs``.
"""

from torchhook import edits, errors, plot, transforms, types
from torchhook._attention import attention, rollout
from torchhook._cam.api import cam
from torchhook._capture import capture, edit, run
from torchhook._classic.api import (
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
from torchhook._clip import clip_gradients
from torchhook._diff.api import diff
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._guard.api import guard
from torchhook._layers.api import layers, ops
from torchhook._recording.records import load
from torchhook._report.api import report
from torchhook._roles.api import lens, roles
from torchhook._statistics import statistics
from torchhook._stream.api import stream
from torchhook._sweep.api import sweep
from torchhook._values.tree import Inputs
from torchhook._version import __version__
from torchhook._watch.api import watch
from torchhook.edits.files import load_edits, save_edits

__all__ = [
    "FeatureExtractor",
    "FeatureLayer",
    "FeatureLayers",
    "Hook",
    "HookManager",
    "Inputs",
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
    "lens",
    "load",
    "load_edits",
    "model_summary",
    "open_features",
    "ops",
    "plot",
    "report",
    "roles",
    "rollout",
    "run",
    "save_edits",
    "statistics",
    "stream",
    "sweep",
    "transforms",
    "types",
    "watch",
]


# Else completion also offers every private room that was imported on the way.
def __dir__() -> list[str]:
    return __all__
