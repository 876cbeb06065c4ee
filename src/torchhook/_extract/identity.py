"""What a run is of: the numbers of the model, its code, and the data. A store of anything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook._core.index import Index
from torchhook._extract import fingerprint, model_code
from torchhook.errors import DataWarning, warn


class Looked:
    """A model as it is before its first batch, and again when that has run or is under way: a GPU waits for neither."""

    def __init__(self, index: Index, functions: Mapping[str, Any]) -> None:
        self._index, self._functions = index, functions
        self.code = model_code.facts(index, functions)
        # Last: the batch comes right after it, and the GPU has that to do until then.
        self.ahead = fingerprint.Ahead(index)

    def again(self) -> None:
        """As long as the model shows what the run has changed."""
        self.code = model_code.steady(self.code, model_code.facts(self._index, self._functions))
        self.ahead.read()


class Identity(NamedTuple):
    """Texts and digests; what they say is compared with what a store says."""

    model: str
    tensors: dict[str, str]
    """A digest of each parameter and buffer."""
    code: dict[str, str]
    data: dict[str, Any]
    device: str

    @classmethod
    def of(
        cls,
        model: nn.Module,
        looked: Looked,
        data: Callable[[], dict[str, Any]],
        device: torch.device,
    ) -> Identity:
        """``data`` tells of the data, which others may be looking at meanwhile: it is asked last."""
        name, tensors = fingerprint.of_tensors(model, looked.ahead)
        return cls(name, tensors, looked.code, data(), device.type)

    def warn(self) -> None:
        if not self.data.get("repeats", True):
            warn(
                "row 0 or one of the other rows that were read twice was not the same: the data is another one each "
                "time (random augmentation?). The features are stored as they come; that a resumed run "
                "has the same data, and the same model, cannot be checked.",
                DataWarning,
            )
