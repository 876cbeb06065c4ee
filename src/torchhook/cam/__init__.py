"""Class activation maps: where in its input a model saw what it says. One file for each idea: formulas, layouts,
targets, the choice of a layer, and the door."""

from torchhook.cam.door import cam
from torchhook.cam.layout import Layout, LayoutError
from torchhook.cam.methods import METHODS
from torchhook.cam.result import CAM

__all__ = ["CAM", "METHODS", "Layout", "LayoutError", "cam"]
