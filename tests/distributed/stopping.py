"""Scenarios: forward passes that end early in models whose weights are put together while they run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from tests.distributed.models import Net, batch, fsdp1, fsdp2, gradients, loss, net, share
from tests.distributed.ranks import each
from tests.distributed.torch26 import repair_fsdp2


def resharded(group: bool = False) -> Net:
    """FSDP2 that takes its weights apart after forward, also those of the root."""
    from torch.distributed.fsdp import fully_shard

    repair_fsdp2()
    model = net()
    for block in [list(model.blocks)] if group else model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    return model


def ahead() -> Net:
    """The second block's weights are gathered while the first one runs."""
    model: Any = resharded()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    return model  # type: ignore[no-any-return]


def fsdp1_ahead() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from tests.distributed.models import Block

    return FullyShardedDataParallel(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        forward_prefetch=True,
        device_id=torch.device("cpu"),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp1": fsdp1,
    "fsdp1_ahead": fsdp1_ahead,
    "fsdp2": resharded,
    "fsdp2_ahead": ahead,
    "fsdp2_grouped": lambda: resharded(group=True),
}


def _run(site: str, **options: Any) -> Callable[[nn.Module, Tensor], Any]:
    return lambda model, x: th.run(model, x, capture=site, stop=True, **options)[1][site]


def _block_stopped(model: nn.Module, x: Tensor) -> Any:
    with th.capture(model, "blocks.0.a", stop=True) as rec:
        model(x)
    return rec["blocks.0.a"]


def _extractor(site: str, **options: Any) -> Callable[[nn.Module, Tensor], Any]:
    return lambda model, x: th.FeatureExtractor(model, [site], stop=True, **options)(x)[site]


def _extracted(model: nn.Module, x: Tensor) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        features = th.extract(model, x, "blocks.0.a", Path(folder) / "store", batch_size=2, progress=False)
        return torch.as_tensor(features["blocks.0.a"][:])


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "run": _run("blocks.0.a"),
    "run at the input": _run("blocks.0:input"),
    "run at an operation": _run("blocks.0/relu"),
    "run at the output": _run("blocks.0"),
    "block": _block_stopped,
    "extractor": _extractor("blocks.0.a"),
    "attached": _extractor("blocks.0.a", attach=True),
    "extract": _extracted,
}
SITES = {"run at the input": "blocks.0:input", "run at an operation": "blocks.0/relu", "run at the output": "blocks.0"}


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    # In torch 2.6 the root's weights stay gathered after any pass without a backward pass, whatever it is told.
    if torch.__version__.startswith("2.6.") and hasattr(model, "reshard"):
        model.reshard()
    optimizer.step()


def followed(kind: str) -> Any:
    """What a pass that ended early gives, and whole ones after it, while the weights change."""
    found = {}
    for way, stopped in WAYS.items():
        model, x = MODELS[kind](), share(batch())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for _ in range(2):
            # FSDP1 itself makes a wrong step if any forward pass comes between a backward pass and the step.
            with torch.no_grad():
                values.append(stopped(model, x).clone())
            optimizer.zero_grad()
            loss(model(x)).backward()
            with torch.no_grad():
                values.append(stopped(model, x).clone() if "2" in kind else values[-1])
            _step(model, optimizer)
        with torch.no_grad():
            last = stopped(model, x).clone()
            found[way] = values, last, model(x), (stopped(model, x), len(model.state_dict()))[1]
    return found


def trained(kind: str) -> Any:
    """Losses on the values at which passes ended, of units that were under way."""
    found = {}
    for attach in (False, True):
        for site in ("blocks.0.a", "blocks.1"):
            model = MODELS[kind]()
            extractor = th.FeatureExtractor(model, [site], stop=True, attach=attach)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss(extractor(share(batch()))[site]).backward()
                grads = gradients(model)
                optimizer.step()
            found[attach, site] = grads
    return found


def around() -> Any:
    """The session knows a part; the block calls what is around it."""
    model, x = resharded(), share(batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(x)).backward()
    with th.capture(model.blocks, "0.a", stop=True) as rec, torch.no_grad():
        model(x)
    first = rec["0.a"]
    _step(model, optimizer)
    with torch.no_grad():
        return first, model(x)


def extracted_before() -> Any:
    """Features of a model whose weights are gathered still; then it is trained."""
    model, x = fsdp2(), share(batch())
    with torch.no_grad():
        model(x)
    _extracted(model, x)
    loss(model(x)).backward()
    return gradients(model)


SCENARIOS = {**each(MODELS, followed), **each([k for k in MODELS if "2" in k], trained), "around": around}
SCENARIOS["extracted_before"] = extracted_before
