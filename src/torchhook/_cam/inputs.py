"""What a map is made of and on: the model's inputs, and the image among them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from torchhook._core import calling
from torchhook._values import tree
from torchhook._values.tree import Inputs


class Subject(NamedTuple):
    """The inputs of a model, with the address of the image (or signal, volume, token ids) whose map is wanted."""

    inputs: Inputs
    address: str
    size: tuple[int, ...]
    examples: int

    @property
    def image(self) -> Tensor:
        image: Tensor = tree.get(self.inputs, self.address)
        return image

    def copies(self, example: int, count: int, image: Tensor | None = None) -> Inputs:
        """``count`` times one example; ``image`` instead of its own."""

        def repeat(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != self.examples:
                return tensor
            return tensor[example : example + 1].expand(count, *tensor.shape[1:])

        repeated: Inputs = tree.map_tensors(repeat, self.inputs)
        if image is not None:
            repeated = tree.put(repeated, self.address, lambda _: image)
        return repeated


def subject(given: Any) -> Subject:
    """Find the image: the floating-point tensor batch × channels × size with most dimensions, else the token ids."""
    inputs = calling.arguments(given)
    # Fresh, plain tensors: the caller may be in inference mode, and autograd does not take inference tensors.
    inputs = tree.map_tensors(lambda tensor: tensor.detach().clone(), inputs)
    found = [(address, leaf) for address, leaf in tree.leaves(inputs) if isinstance(leaf, Tensor)]
    images = [(a, t) for a, t in found if t.is_floating_point() and t.dim() >= 3]
    ids = [(a, t) for a, t in found if not t.is_floating_point() and t.dim() == 2]
    if images:
        address, image = max(images, key=lambda pair: (pair[1].dim(), math.prod(pair[1].shape)))
    elif ids:
        address, image = ids[0]
    else:
        raise TypeError(
            f"a class activation map needs an input of batch × channels × size, or token ids of batch × length; "
            f"found {tree.describe(given)}."
        )
    if not image.numel():
        raise ValueError(f"a class activation map needs an example, and the batch is empty: {tree.describe(given)}.")
    return Subject(inputs, address, tuple(image.shape[2 if images else 1 :]), image.shape[0])
