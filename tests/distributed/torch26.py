"""What FSDP2 of torch 2.6 lacks on the CPU, as later versions have it.

Without this library, and on the CPU alone, it stops at a method that streams lack; with that method, its backward pass
refuses weights that were freed and gathered again (``reshard_after_forward``), and gradients are the sum over the ranks
instead of their mean. Mended here, so that what this library does with FSDP2 is tested in its oldest version too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed


@functools.cache
def repair_fsdp2() -> None:
    """Let ``fully_shard`` train on the CPU; ``test_training.py`` shows that it does."""
    _complete_streams()
    if torch.__version__.startswith("2.6."):
        _gather_unnoticed()
        _average_over_gloo()


def _complete_streams() -> None:
    """There is nothing to wait for on a CPU."""
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda *arguments: None)


def _gather_unnoticed() -> None:
    """A weight that was freed and is gathered again has the numbers that the backward pass saved.

    The kernel of the CPU counts the copy as a change of the weight. Later versions put the count back, as this does.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    copy_out: Callable[..., None] = _fsdp_param_group.foreach_all_gather_copy_out

    @functools.wraps(copy_out)
    def counted_once(result: Any, parameters: list[Any], group: Any) -> None:
        # Of the first gathering there is nothing yet: its count is the one that the forward pass saves.
        gathered = [output for parameter in parameters for output in parameter.all_gather_outputs]
        before = [output._version for output in gathered]
        copy_out(result, parameters, group)
        for output, version in zip(gathered, before, strict=True):
            torch._C._autograd._unsafe_set_version_counter(output, version)

    _fsdp_param_group.foreach_all_gather_copy_out = counted_once


def _average_over_gloo() -> None:
    """The gloo of this version adds where it is asked for the mean, and says nothing."""
    reduce_scatter = distributed.reduce_scatter_tensor

    @functools.wraps(reduce_scatter)
    def averaged(output: Any, input: Any, op: Any = distributed.ReduceOp.SUM, group: Any = None, **rest: Any) -> Any:
        work = reduce_scatter(output, input, op=op, group=group, **rest)
        if op == distributed.ReduceOp.AVG and distributed.get_backend(group) == "gloo":
            assert work is None, "a reduction that is still under way cannot be divided"
            output.div_(distributed.get_world_size(group))
        return work

    distributed.reduce_scatter_tensor = averaged
