"""CUDA graphs: what a compiled extractor returned stays what it was when the graph is played again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import torchhook as th
from torchhook._torch import cuda_graphs

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


class Images(nn.Module):
    """Its convolutions have their channels last in compiled code, and first in eager code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.b, self.relu = nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.b(self.relu(self.norm(self.a(x))))
        return y.mean((2, 3)), {"all": y, "again": y, "some": y[:, ::2], "wide": y[:, :1].expand(-1, 8, -1, -1)}


SITES = ["a", "norm", "b"]


def images(rows: int = 4) -> list[Tensor]:
    made = torch.Generator("cuda")
    return [torch.randn(rows, 3, 16, 16, device="cuda", generator=made.manual_seed(i)) for i in range(6)]


def seen_and_returned(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Copies of what bare hooks see and of what the model returns, in order."""
    seen: dict[str, Tensor] = {}

    def keep(site: str) -> RemovableHandle:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            seen[site] = output.clone()

        return net.get_submodule(site).register_forward_hook(hook)

    handles = [keep(site) for site in SITES]
    returned = [value.clone() for value in torch.utils._pytree.tree_leaves(net(x))]
    for handle in handles:
        handle.remove()
    return [*(seen[site] for site in SITES), *returned]


def assert_as_eager(found: object, net: nn.Module, x: Tensor) -> None:
    values = torch.utils._pytree.tree_leaves(found)
    for value, other in zip(values, seen_and_returned(net, x), strict=True):
        assert value.stride() == other.stride(), (value.shape, value.stride(), other.stride())
        torch.testing.assert_close(value, other, rtol=1e-2, atol=1e-2)


def test_after_the_next_replays_values_and_strides_are_those_of_eager_code() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        for mode in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
            torch._dynamo.reset()
            net = Images().cuda().eval().to(memory_format=layout)
            hooked = th.FeatureLayers(net, SITES, attach=True)
            hooked.compile(fullgraph=True, **mode)
            with torch.no_grad():
                given = [x.to(memory_format=layout) for x in images()]
                found = [hooked(x) for x in given]
                for result, x in zip(found, given, strict=True):
                    assert_as_eager(result, net, x)
                    assert result[0][0] is result[0]["a"]
                    assert result[1][1]["all"] is result[1][1]["again"]


def test_in_the_graph_features_are_left_as_they_are_and_copied_once() -> None:
    torch._dynamo.reset()
    shapes: list[tuple[int, ...]] = []
    compiled_copies = cuda_graphs._compiled_copies

    def noted() -> object:
        quickly = compiled_copies()
        return lambda values, strides: (shapes.extend(v.stride() for v in values), quickly(values, strides))[1]

    cuda_graphs._compiled_copies = noted
    try:
        hooked = th.FeatureLayers(Images().cuda().eval(), SITES, attach=True)
        hooked.compile(fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for x in images():
                hooked(x)
    finally:
        cuda_graphs._compiled_copies = compiled_copies
    assert (64 * 256, 1, 16 * 64, 64) in shapes  # channels last


def test_graphs_of_several_shapes_with_and_without_gradients_take_turns() -> None:
    torch._dynamo.reset()
    net = Images().cuda().eval()
    hooked = th.FeatureLayers(net, SITES, attach=True)
    hooked.compile(fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        for rows in (2, 3, 2):
            for learning in (False, True):
                with torch.set_grad_enabled(learning):
                    found = [hooked(x) for x in images(rows)[:2]]
                    for result, x in zip(found, images(rows), strict=False):
                        assert_as_eager(result, net, x)
                        assert result[0]["a"].requires_grad == learning


def test_gradients_of_convolutions_flow_through_what_was_copied_out() -> None:
    torch._dynamo.reset()
    net = Images().cuda().eval()
    hooked = th.FeatureLayers(net, SITES, attach=True)
    hooked.compile(fullgraph=True, mode="reduce-overhead")
    parameters = list(net.parameters())

    def gradients(features: list[Tensor], output: Tensor) -> list[Tensor]:
        loss = output.square().sum() + sum(feature.square().mean() for feature in features)
        return list(torch.autograd.grad(loss, parameters))

    for x in images():
        features, (output, _) = hooked(x)
        found = gradients(list(features), output)
        a = net.a(x)
        norm = net.norm(a)
        b = net.b(torch.relu(norm))
        expected = gradients([a, norm, b], b.mean((2, 3)))
        for mine, other in zip(found, expected, strict=True):
            assert (mine - other).norm() <= 1e-2 * other.norm()


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
