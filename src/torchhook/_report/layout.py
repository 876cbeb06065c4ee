"""How the values of one run are laid out: by the layer, by the size of the input and the grids of convolutions, and by
the shape alone where these do not tell."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn

from torchhook._values import tree
from torchhook._values.layout import Grids, Layout, guess, infer, kind_by_type
from torchhook._values.tree import Inputs
from torchhook.errors import LayoutError

_FEW = 5  # class, distillation and register tokens come before the patches; more is text that happens to fit


class Layouts:
    """Tells the layout of what a layer gives. ``patches`` says that the input is an image, so that tokens may be its
    patches."""

    def __init__(self, inputs: Inputs, patches: bool) -> None:
        # The most dims win: beside a video, a single frame does not tell what the tokens are.
        images = [t for t in tree.tensors(inputs) if t.is_floating_point() and t.dim() >= 4]
        image = max(images, key=Tensor.dim, default=None)
        self._size = () if image is None else tuple(image.shape[2:])
        self._examples = 0 if image is None else image.shape[0]
        self._patches = patches
        self._grids = Grids(len(self._size))

    def of(self, module: nn.Module, value: Tensor) -> Layout | None:
        """The layout of what the module gave, or ``None`` where there are no channels and places to tell apart."""
        if value.dim() < 3 or value.is_nested:
            return None
        # What comes after a convolution, tokens too, often lies on its grid.
        if self._grids.concern(module):
            self._grids.see(value)
        kind = kind_by_type(module, value.dim())
        if value.dim() == 3:
            patches = self._patches and kind != "channels_first"
            return self._tokens(value) if patches else guess(value.shape, kind or "channels_last")
        if kind is None and value.dim() == len(self._size) + 2:
            with contextlib.suppress(LayoutError):
                return infer(value.shape, self._size, self._examples, self._grids.seen)
        return guess(value.shape, kind)

    def _tokens(self, value: Tensor) -> Layout:
        with contextlib.suppress(LayoutError):
            found = infer(value.shape, self._size, self._examples, self._grids.seen, "tokens")
            if found.prefix <= _FEW:
                return found
        return guess(value.shape, image=True)
