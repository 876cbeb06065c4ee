"""Scenarios: losses on values that were kept alive inside of what FSDP wraps; tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

import torchhook as th
from tests.distributed.models import WRAPPED, Net, batch, fsdp2, gradients, loss, net, share
from tests.distributed.ranks import each
from torchhook import edits

INSIDE = ["blocks.0.a", "blocks.0.b:input", "blocks.0.b.weight", "head.weight"]
OUTSIDE = ["blocks.0", "head", "(model)", "blocks.1:input", "blocks.0.a:input"]
SHARDED = ["fsdp1", "fsdp2"]


def alone(kind: str) -> Any:
    """A loss on nothing but the kept value."""
    found: dict[str, Any] = {}
    for site in [*INSIDE, *OUTSIDE]:
        model = WRAPPED[kind]()
        with th.capture(model, site, keep="live") as rec:
            model(share(batch()).requires_grad_())
        try:
            rec[site].pow(2).sum().backward()
            # FSDP1 waits for a gradient at its root before it lets anyone look.
            found[site] = gradients(model) if kind == "fsdp2" else "no error"
        except th.errors.SessionError as error:
            found[site] = str(error)
    return found


def attached() -> Any:
    """The same with hooks that stay."""
    found = {}
    for site in ["blocks.0.a", "blocks.0"]:
        model = fsdp2()
        features = th.FeatureExtractor(model, [site], attach=True)(share(batch()))
        try:
            features[site].pow(2).sum().backward()
            found[site] = gradients(model)
        except th.errors.SessionError as error:
            found[site] = str(error)
    return found


def ended_early(kind: str) -> Any:
    """A loss on a feature at which the forward pass ended: the wrapper never learned that a backward pass comes."""
    found: dict[bool, Any] = {}
    for attach in (False, True):
        model = WRAPPED[kind]()
        extractor = th.FeatureExtractor(model, ["blocks.0"], stop=True, attach=attach)
        with torch.no_grad():
            value = extractor(share(batch()))["blocks.0"]
        try:
            loss(extractor(share(batch()))["blocks.0"]).backward()
            found[attach] = value, gradients(model)
        except th.errors.SessionError as error:
            found[attach] = value, str(error)
    return found


def ended_early_inside() -> Any:
    """The same where the wrapper is around all of it."""
    around = nn.parallel.DistributedDataParallel(
        th.FeatureExtractor(net(), ["blocks.0"], stop=True), find_unused_parameters=True
    )
    loss(around(share(batch()))["blocks.0"]).backward()
    return {name.removeprefix("model."): grad for name, grad in gradients(around).items()}


def added(kind: str) -> Any:
    """A loss on the kept value, added to one on the output."""
    found = {}
    for site in ["blocks.0.a", "blocks.0.b:input", "blocks.0"]:
        model = WRAPPED[kind]()
        with th.capture(model, site, keep="live") as rec:
            output = model(share(batch()))
        (loss(output) + loss(rec[site])).backward()
        found[site] = gradients(model)
    return found


# -- tensor parallelism -----------------------------------------------------------------------------------


def parallel(use_local_output: bool = True, model: Net | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net() if model is None else model
    for block in model.blocks:
        a = ColwiseParallel(use_local_output=use_local_output)
        b = RowwiseParallel(input_layouts=Shard(-1))
        parallelize_module(block, init_device_mesh("cpu", (distributed.get_world_size(),)), {"a": a, "b": b})
    return model


def tensor_parallel() -> Any:
    model = parallel(use_local_output=False)
    with th.capture(model, "blocks.0.a", "blocks.0", "blocks.0.a:grad", "blocks.0.a.weight:grad", gather="full") as rec:
        loss(model(batch())).backward()
    return {key: rec[key] for key in rec}, gradients(model)


def tensor_parallel_edits() -> Any:
    model = parallel(use_local_output=False)
    vector = torch.arange(10.0)
    with th.edit(model, {"blocks.0.a": edits.add(vector), "blocks.1.a": edits.zero()}):
        return model(batch()).detach()


def tensor_parallel_clip() -> Any:
    model = parallel()
    with th.clip_gradients(model, norm=0.5):
        loss(model(batch())).backward()
    return gradients(model)


def tensor_parallel_watch() -> Any:
    model = parallel(use_local_output=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.watch(model, every=10) as w:
        for _ in range(100):
            optimizer.zero_grad()
            loss(model(batch())).backward()
            optimizer.step()
    return [(shot.step, shot.sites) for shot in w.history]


def tensor_parallel_guard() -> Any:
    model = net()
    with torch.no_grad():
        model.blocks[1].b.weight[0, 0] = float("nan")
    wrapped = parallel(model=model)
    with th.guard(wrapped, action="record") as g:
        wrapped(batch())
    return [(f.kind, str(f.site)) for f in g.findings]


def compared_and_reported() -> Any:
    from torchhook._report.collect import collect

    model, whole = parallel(use_local_output=False), net()
    with torch.no_grad():
        whole.blocks[0].a.bias[7] += 1.0  # on the second rank
        _, mine = th.run(model, batch(), capture=["blocks.0.a", "head"])
        _, other = th.run(whole, batch(), capture=["blocks.0.a", "head"])
    found = [th.diff(one, two) for one, two in ((mine, other), (other, mine), (mine, mine))]
    page = collect(model, batch(), gradients=False, attention=False)
    numbers = {layer.path: layer.calls[0].value for layer in page.layers if layer.calls}
    return found, page.notes, numbers["blocks.0.a"]


def saved_parts() -> Any:
    import tempfile
    import warnings

    model = parallel(use_local_output=False)
    with th.capture(model, "blocks.0.a") as rec, torch.no_grad():
        model(batch())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rec.save(f"{folder}/rec.safetensors")
        return th.load(f"{folder}/rec.safetensors")["blocks.0.a"], [str(w.message) for w in said]


def tensor_parallel_edits_of_gradients() -> Any:
    model = parallel(use_local_output=False)
    changes = {"blocks.0.a:grad": edits.scale(3.0), "blocks.1.a.weight:grad": edits.clamp(-0.1, 0.1)}
    with th.edit(model, changes):
        loss(model(batch())).backward()
    return gradients(model)


def tensor_parallel_one_rank() -> Any:
    """Nobody waits for a rank that has nothing open."""
    model = parallel(use_local_output=False)
    if distributed.get_rank() == 1:
        loss(model(batch())).backward()
        return gradients(model)
    sites = ["blocks.0.a", "blocks.0.a:grad", "blocks.0.a.weight:grad", "head"]
    with th.capture(model, *sites) as rec, th.guard(model):
        loss(model(batch())).backward()
    gradients(model)  # the other rank asks, too
    return {key: rec[key].to_local() if hasattr(rec[key], "to_local") else rec[key] for key in rec}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(self.norm(x))))


PARTIAL = ["norm.weight:grad", "down/linear"]


def partial_one_rank() -> Any:
    """Sequence parallelism: some values are sums that no rank has, of which this one keeps its summand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = Normed()
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    plan = {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    x = batch().view(2, 4, 6).chunk(2, 1)[distributed.get_rank()]
    if distributed.get_rank() == 1:
        loss(model(x)).backward()
        return "no session"
    with th.capture(model, *PARTIAL) as rec:
        loss(model(x)).backward()
    return {site: (rec[site].placements[0].is_partial(), tuple(rec[site].shape)) for site in PARTIAL}


SCENARIOS = {
    f.__name__: f
    for f in (
        partial_one_rank,
        attached,
        ended_early_inside,
        tensor_parallel,
        tensor_parallel_edits,
        tensor_parallel_clip,
        tensor_parallel_watch,
        tensor_parallel_guard,
        tensor_parallel_edits_of_gradients,
        tensor_parallel_one_rank,
        compared_and_reported,
        saved_parts,
    )
}
SCENARIOS |= each(SHARDED, alone, added)
SCENARIOS |= each(WRAPPED, ended_early)
