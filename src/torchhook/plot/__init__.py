"""Pictures of recordings, tensors, attention maps, diffs, sweeps and lenses.

Every function takes ``ax=`` or ``fig=``, returns the figure, and leaves pyplot and its settings alone. Nothing here
runs a model; matplotlib is loaded when the first picture is drawn.
"""

from torchhook.plot.attention import attention
from torchhook.plot.comparisons import diff, sweep
from torchhook.plot.depth import gradient_flow, statistics
from torchhook.plot.features import feature_maps
from torchhook.plot.histogram import histogram
from torchhook.plot.lens import lens
from torchhook.plot.overlay import overlay

__all__ = [
    "attention",
    "diff",
    "feature_maps",
    "gradient_flow",
    "histogram",
    "lens",
    "overlay",
    "statistics",
    "sweep",
]
