"""CUDA graphs: what a compiled extractor returned stays what it was when the graph is played again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchhook as th

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.GELU()).cuda().eval()


def bare(net: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = net[0].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    net(x)
    handle.remove()
    return seen[0]


def inputs() -> list[Tensor]:
    return [torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in range(6)]


def test_features_outlive_the_next_replay_when_a_wrapper_compiles_itself() -> None:
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        torch._dynamo.reset()
        net = model()
        hooked = th.FeatureLayers(net, ["0"], attach=True)
        hooked.compile(fullgraph=True, **options)
        with torch.no_grad():
            found = [hooked(x) for x in inputs()]
            for (features, output), x in zip(found, inputs(), strict=True):
                torch.testing.assert_close(features["0"], bare(net, x), rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(output, net(x), rtol=1e-3, atol=1e-3)


def test_gradients_flow_through_what_was_copied_out() -> None:
    torch._dynamo.reset()
    net = model()
    hooked = th.FeatureExtractor(net, ["0"], attach=True)
    hooked.compile(fullgraph=True, mode="reduce-overhead")
    for x in inputs():
        net.zero_grad()
        hooked(x)["0"].square().sum().backward()
        found = net[0].weight.grad.clone()
        net.zero_grad()
        nn.functional.linear(x, net[0].weight, net[0].bias).square().sum().backward()
        torch.testing.assert_close(found, net[0].weight.grad, rtol=1e-2, atol=1e-2)


def test_sessions_run_a_model_with_cuda_graphs_eagerly_and_keep_what_passed() -> None:
    torch._dynamo.reset()
    net = model()
    made = torch.compile(net, mode="reduce-overhead")
    with torch.no_grad():
        for x in inputs()[:3]:
            made(x)
        kept = []
        for x in inputs():
            with th.capture(made, "0") as rec:
                made(x)
            kept.append(rec["0"])
        for value, x in zip(kept, inputs(), strict=True):
            torch.testing.assert_close(value, bare(net, x), rtol=1e-3, atol=1e-3)
