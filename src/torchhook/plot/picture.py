"""The figure that plots return. The only file that imports matplotlib when it is loaded."""

from __future__ import annotations

import io
from typing import Any, Literal

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that pyplot does not know: nothing to close, nothing shown twice; a notebook shows it once."""

    def __init__(self, width: float, height: float, layout: Literal["constrained", "compressed"]) -> None:
        # As dark as the user's other figures; a transparent one would be unreadable on some page.
        face = to_rgba(rcParams["figure.facecolor"])
        super().__init__(figsize=(width, height), dpi=110, facecolor=face if face[3] == 1 else "white", layout=layout)
        # The canvas that a figure has by itself draws nothing when told to.
        FigureCanvasAgg(self)

    def add_subplot(self, *args: Any, **options: Any) -> Any:
        # A style may have axes of another color, which our lines and letters are not made for.
        return super().add_subplot(*args, **{"facecolor": self.get_facecolor(), **options})

    # Notebooks know how to show figures once pyplot has told them, and this one comes without pyplot.
    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
