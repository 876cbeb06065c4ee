"""Where several ranks share the work, whether one of them can repeat a run without the others."""

from __future__ import annotations

from torch import nn

from torchhook._core.index import Index
from torchhook._core.sharding import Homes
from torchhook._torch import sharded
from torchhook._values.subclasses import sharded_over


def can_repeat_alone(index: Index) -> bool:
    """Whether the model can run on one rank alone: DDP's inner module can, parameters in pieces cannot.

    A repetition that meets a collective after all is ended before it; see ``repetition``.
    """
    if sharded.rank_store() is None:
        return True
    if any(isinstance(module, nn.SyncBatchNorm) for module in index.distinct.values()):
        return False
    homes = Homes(index)
    # Those that FSDP has flattened are no parameters of their modules while nothing runs.
    found = [*homes, *(homes.of(module, name) for module, name in index.tensors.values())]
    return all(home is None or (home.way in ("own", "replicated") and not sharded_over(home.value)) for home in found)
