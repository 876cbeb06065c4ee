import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import torchhook as th


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 10)
        s.b = nn.Linear(10, 6)

    def forward(s, x):
        return x + s.b(torch.relu(s.a(x)))


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.blocks = nn.Sequential(Block(), Block())
        s.head = nn.Linear(6, 3)

    def forward(s, x):
        return s.head(s.blocks(x))


def net():
    torch.manual_seed(0)
    return Net()


def data():
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=g) * 3


def part(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def ddp_grad():
    m = DDP(net())
    with th.capture(m, "head.weight:grad") as rec:
        m(part(data())).pow(2).mean().backward()
    return rec["head.weight:grad"].norm(), m.module.head.weight.grad.norm()


def fsdp2():
    m = net()
    for b in m.blocks:
        fully_shard(b)
    fully_shard(m)
    order = []
    w = m.blocks[0].a.weight
    w.register_post_accumulate_grad_hook(
        lambda p: order.append(("post", type(p).__name__, type(p.grad).__name__, p is w))
    )
    m.blocks[0].a.register_forward_pre_hook(lambda mod, a: order.append((type(mod.weight).__name__, mod.weight.shape)))
    m(part(data())).pow(2).mean().backward()
    order.append(
        (type(m.blocks[0].a.weight).__name__, m.blocks[0].a.weight is w, w.grad.shape, w.grad.to_local().shape)
    )
    return order


def fsdp1():
    m = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"))
    order = []
    inner = m.module.blocks[0].module.a
    w = inner.weight
    order.append((type(w).__name__, w.shape, w.untyped_storage().nbytes()))
    inner.register_forward_pre_hook(
        lambda mod, a: order.append((type(mod.weight).__name__, mod.weight.shape, mod.weight is w, mod.weight.is_leaf))
    )
    m(part(data())).pow(2).mean().backward()
    order.append(
        (
            inner.weight is w,
            None if w.grad is None else w.grad.shape,
            w.shape,
            [(n, p.shape, p.grad is None) for n, p in m.named_parameters()],
        )
    )
    return order


def watch2():
    m = net()
    for b in m.blocks:
        fully_shard(b)
    fully_shard(m)
    o = torch.optim.SGD(m.parameters(), 0.01)
    with th.watch(m) as w:
        for _ in range(3):
            m(part(data())).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    return str(w.table())


SCENARIOS = {f.__name__: f for f in (ddp_grad, fsdp2, fsdp1, watch2)}
