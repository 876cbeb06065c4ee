"""The model that is trained on several ranks, and what a single process makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from tests.distributed.torch26 import repair_fsdp2


class Block(nn.Module):
    """Has weights of odd shapes: parts of different sizes lie on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.b = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.b(torch.relu(self.a(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(x))
        return result


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> Tensor:
    return 3 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def share(x: Tensor) -> Tensor:
    """This rank's part of a batch; in a single process, all of it."""
    if not distributed.is_initialized():
        return x
    return x.chunk(distributed.get_world_size())[distributed.get_rank()]


def loss(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net(), **options)


def fsdp1(use_orig_params: bool = True, model: nn.Module | None = None) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        net() if model is None else model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: Net | None = None) -> Net:
    from torch.distributed.fsdp import fully_shard

    repair_fsdp2()
    model = net() if model is None else model
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


WRAPPED = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What the optimizer will see, of the whole parameters, by their own names."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _grads(model)
    return _grads(model)


def _grads(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            plain = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            found[plain] = whole(parameter.grad).detach().clone()
    return found
