"""What every test needs: torchvision beside a CPU torch, one thread, and the same random numbers each time."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("torchhook", deadline=None)  # machines are noisy
settings.load_profile("torchhook")


def _declare_missing_operators() -> None:
    """torchvision's wheels are built for CUDA torch: beside a CPU build, its import misses two operators."""
    try:
        import torchvision
    except (RuntimeError, AttributeError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # it must outlive the import
        import sys

        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision  # noqa: F401


_declare_missing_operators()
