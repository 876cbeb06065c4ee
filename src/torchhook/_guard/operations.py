"""What has to be known of operations: which make no values, which write to their arguments, what goes into a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchhook._values import tree
from torchhook._values.memory import storage

Named = list[tuple[str, Tensor]]

# They look at a shape, or show the same memory in another one; some copy where they cannot, see ``is_view``.
VIEWS = frozenset(
    {
        *("view", "view_as", "reshape", "reshape_as", "transpose", "t", "permute", "movedim", "swapaxes", "swapdims"),
        *("flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "broadcast_tensors"),
        *("getitem", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "unfold", "diagonal"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
        *("contiguous", "detach", "detach_", "requires_grad_", "size", "dim", "numel", "stride", "register_hook"),
    }
)
# Their backward only moves a gradient. Not Expand and the like: what was spread out is summed, and a sum can overflow.
VIEW_NODES = re.compile(
    r"(?:View|Alias|ReshapeAlias|UnsafeView|Transpose|T|Permute|Select|Slice|Split|SplitWithSizes|Unsqueeze|Squeeze"
    r"|Unbind|Clone|AsStrided)Backward\d*"
)

# They put weights together elsewhere, for a kernel to come: what is wrong with one is that kernel's to show.
MOVES = frozenset({"_cudnn_rnn_flatten_weight"})

# Their memory holds whatever was there before: an old NaN in it is not a value of the model.
UNINITIALIZED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "Tensor"}
)
# They write to all of their tensor and read nothing there, after which it is memory like any other.
FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_", "random_"})


def is_view(name: str, outputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation made no values."""
    # By the memory and not by the name alone: ``reshape`` and ``contiguous`` copy where strides do not fit.
    return name in VIEWS and storage(outputs[0]) in {storage(t) for t in tree.tensors([args, kwargs])}


def named(value: Any, prefix: str) -> Named:
    """The tensors in a value, each with its address there."""
    if isinstance(value, Tensor):
        return [(prefix, value)]
    return [(f"{prefix}.{address}", leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Named, list[float]]:
    """The tensors and the numbers that an operation reads."""
    tensors: Named = []
    constants: list[float] = []
    for name, value in (*((str(i), a) for i, a in enumerate(args)), *kwargs.items()):
        if name == "out":  # written to, not read
            continue
        for address, leaf in tree.leaves(value):
            if isinstance(leaf, Tensor):
                tensors.append((f"{name}.{address}" if address else name, leaf))
            elif isinstance(leaf, float):
                constants.append(leaf)
    return tensors, constants


def overwritten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation is about to write to."""
    if "out" in kwargs:
        yield from tree.tensors(kwargs["out"])
    elif name == "setitem" or (name.endswith("_") and name not in VIEWS):
        yield from tree.tensors(list(args[:1]))
    elif name in ("batch_norm", "instance_norm"):
        # In training they write to the running statistics, although no name says so.
        running = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        yield from (t for t in running if isinstance(t, Tensor))


def results(output: Any, args: tuple[Any, ...], wrote: bool) -> list[Tensor]:
    """The tensors that an operation made; one that wrote may return nothing, as ``x[i] = y`` does."""
    if isinstance(output, Tensor):
        return [output]
    if output is None:
        return list(tree.tensors(list(args[:1]))) if wrote else []
    return list(tree.tensors(output))
