"""Where the parameters of a model are between steps, when ranks share the work.

==========  ==================================  =======================================  ============================
            what a rank keeps                   while the module runs                    its gradient is ready
==========  ==================================  =======================================  ============================
alone, TP   the parameter (TP: a DTensor)       the same                                 when autograd hands it over
DDP         the parameter                       the same, with this rank's gradient      when the pass has ended
FSDP1       a piece of the flattened parameter  a view of what was gathered              when the pass has ended
FSDP2       a DTensor                           what was gathered, freed afterwards      after the reduction
==========  ==================================  =======================================  ============================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn

from torchhook._core.index import Index
from torchhook._torch import sharded
from torchhook._values.subclasses import sharded_over

Way = Literal["own", "replicated", "flat", "sharded"]


class Home(NamedTuple):
    """How a parameter is kept."""

    way: Way
    parameter: Tensor
    """What the optimizer moves."""
    value: Tensor
    """What of it lies on this rank."""
    leaf: Tensor
    """Whose hooks are called when a gradient comes."""
    shape: torch.Size
    groups: tuple[Any, ...] = ()
    """The process groups over which its parts lie."""
    unit: Any = None
    """The wrapper, or FSDP2's state, that puts it or its gradient together."""

    @property
    def is_reduced(self) -> bool:
        """Whether what ``.grad`` holds now is the sum over all ranks: a pass under ``no_sync`` leaves each its own."""
        if self.way == "replicated":
            return bool(getattr(self.unit, "require_backward_grad_sync", True))
        if self.way != "flat":
            return True
        syncs, grad = sharded.syncs_gradients(self.unit), self.parameter.grad
        return (grad is None or grad.shape == self.parameter.shape) if syncs is None else syncs

    @property
    def may_be_unused(self) -> bool:
        """Whether there may be a gradient of the others at the end of a pass in which this rank did not use it."""
        unit = self.unit
        return self.way == "replicated" and bool(unit.find_unused_parameters or unit.static_graph)

    def whole(self, piece: Tensor) -> Tensor:
        """All of what this is the piece of; every rank has to ask."""
        if self.way != "flat" or not self.groups:
            return piece
        sizes = gathered(piece.numel(), self.groups)
        # Of one size for all: ranks hold pieces of any, also of none.
        padded = torch.nn.functional.pad(piece.reshape(-1), (0, max(sizes) - piece.numel()))
        pieces = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(pieces, padded, self.groups[0])
        return torch.cat([one[:size] for one, size in zip(pieces, sizes, strict=True)]).view(self.shape)

    def piece(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's piece of a whole; every rank has to ask."""
        if self.way != "flat" or not self.groups:
            return whole
        # Pieces lie one behind the other, in the order of the ranks.
        sizes = gathered(like.numel(), self.groups)
        start = sum(sizes[: distributed.get_rank(self.groups[0])])
        return whole.reshape(-1)[start : start + like.numel()]


class Homes:
    """The parameters of a model that are not simply where the model has them."""

    def __init__(self, index: Index) -> None:
        self._known: dict[tuple[int, str], Home] = {}
        if not (distributed.is_available() and distributed.is_initialized()):
            return  # a rank alone: no walk through the model
        for wrapper in index.wrappers:
            if _is_ddp(wrapper):
                self._add_replicated(wrapper)
        for module in (*index.wrappers, *index.distinct.values()):
            for shard in sharded.shards(module):
                flat = shard.leaf is not shard.parameter or shard.name == "_flat_param"
                groups = ((shard.group,) if shard.group is not None else ()) if flat else sharded_over(shard.value)
                self._known[id(shard.module), shard.name] = Home(
                    "flat" if flat else "sharded",
                    shard.parameter,
                    shard.value,
                    shard.leaf,
                    shard.shape,
                    groups,
                    module if flat else shard.unit,
                )

    def _add_replicated(self, wrapper: Any) -> None:
        for path, module in wrapper.module.named_modules():
            for name, tensor in module._parameters.items():
                full_name = f"{path}.{name}" if path else name
                if tensor is not None and tensor.requires_grad and full_name not in wrapper.parameters_to_ignore:
                    self._known[id(module), name] = Home(
                        "replicated", tensor, tensor, tensor, tensor.shape, (), wrapper
                    )

    def __iter__(self) -> Iterator[Home]:
        return iter(self._known.values())

    def __bool__(self) -> bool:
        return bool(self._known)

    def of(self, module: nn.Module, name: str) -> Home | None:
        """Where a module's own parameter is; ``None`` where the module has none of that name."""
        known = self._known.get((id(module), name))
        if known is not None:
            return known
        tensor = module._parameters.get(name)
        return None if tensor is None else Home("own", tensor, tensor, tensor, tensor.shape, sharded_over(tensor))


def _is_ddp(module: nn.Module) -> bool:
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    return any(kind.__name__ == "DistributedDataParallel" for kind in kinds)


def gathered(mine: Any, groups: tuple[Any, ...]) -> list[Any]:
    """What each rank of the groups has, in their order; all have to ask."""
    found = [mine]
    for group in groups:
        several: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(several, found, group)
        found = [one for some in several for one in some]
    return found
