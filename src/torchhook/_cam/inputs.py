"""What a map is made of and on: the model's inputs, and the image among them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._values import tree
from torchhook._values.layout import spatial_dims
from torchhook._values.tree import Inputs
from torchhook.errors import TorchHookError


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
            if not tensor.dim() or tensor.shape[0] != self.examples:  # shared by all examples, as a mask may be
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
        address, image = ids[0]  # tokenizers and models have the ids before the mask, which looks the same
    elif whole := [tensor for _, tensor in found if not tensor.is_floating_point() and tensor.dim() >= 3]:
        given_as, scaled = str(whole[0].dtype).removeprefix("torch."), " / 255" * (whole[0].dtype == torch.uint8)
        raise TypeError(
            f"the image is {given_as}, and a class activation map needs one in floating-point numbers: give "
            f"x.float(){scaled}, normalized as the model was trained."
        )
    else:
        raise TypeError(
            f"a class activation map needs an input of batch × channels × size, or token ids of batch × length; "
            f"found {tree.describe(given)}."
        )
    if not image.numel():
        raise ValueError(f"a class activation map needs an example, and the batch is empty: {tree.describe(given)}.")
    return Subject(inputs, address, tuple(image.shape[2 if images else 1 :]), image.shape[0])


class NoBatchError(Exception):
    """A convolution was called with the image as one example; ``told_to_fit`` says what to do."""


def refuse_one_example(module: nn.Module, value: Any, image: Tensor) -> None:
    """Torch's convolutions take one example without a batch too, whose channels would be seen as examples here."""
    rank = spatial_dims(module)
    if rank is not None and isinstance(value, Tensor) and value.dim() == rank + 1 == image.dim():
        raise NoBatchError


@contextlib.contextmanager
def told_to_fit(index: Index, shown: Subject) -> Iterator[None]:
    """Where the model fails on an image whose dims are not those of its first convolution, say that in its place."""
    try:
        yield
    except TorchHookError:
        raise  # a wrong target or layer, which has been told already
    except Exception as error:
        advice = _misfit(index, tuple(shown.image.shape), isinstance(error, NoBatchError))
        if advice is None:
            raise
        raise ValueError(advice) from (None if isinstance(error, NoBatchError) else error)


def _misfit(index: Index, shape: tuple[int, ...], is_one: bool) -> str | None:
    # Only asked once it failed: a model may well make images itself of what it takes, as of spectrograms.
    convolutions = (m for m in index.distinct.values() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    first = next(convolutions, None)
    rank = None if first is None else spatial_dims(first)
    if first is None or rank is None:
        return None
    channels, sizes = first.in_channels, ("length", "height × width", "depth × height × width")[rank - 1]
    wanted = f"the model takes batch × channels × {sizes}"
    if len(shape) == rank + 1 and (is_one or shape[0] == channels):
        return f"an image of shape {shape} has no batch dimension, and {wanted}: give x[None]."
    if shape[-1] == channels and len(shape) in (rank + 1, rank + 2) and shape[-rank - 1] != channels:
        spatial = range(len(shape) - rank - 1, len(shape) - 1)
        one = "[None]" * (len(shape) == rank + 1)
        order = ", ".join(map(str, (*range(len(shape) - rank - 1), len(shape) - 1, *spatial)))
        return f"an image of shape {shape} has its channels last, and {wanted}: give x.permute({order}){one}."
    return None
