"""The figure that plots return. The only file that imports matplotlib when it is loaded."""

from __future__ import annotations

import io
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that pyplot does not know: nothing to close, nothing shown twice; a notebook shows it once."""

    def __init__(self, width: float, height: float, layout: Literal["constrained", "compressed"]) -> None:
        super().__init__(figsize=(width, height), dpi=110, facecolor="white", layout=layout)
        # The canvas that a figure has by itself draws nothing when told to.
        FigureCanvasAgg(self)

    # Notebooks know how to show figures once pyplot has told them, and this one comes without pyplot.
    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
