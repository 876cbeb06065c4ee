"""What is copied out of CUDA graphs: the layout is eager's, and so are values and gradients.

Without a GPU nothing is written over; what is said to be is handled as on one.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchhook as th
from torchhook._torch import cuda_graphs

pytestmark = pytest.mark.filterwarnings("ignore")  # of what torch itself uses in inductor

# Also on a CPU, inductor then gives convolutions the layout that they have on a GPU.
OPTIONS = {"triton.cudagraphs": True, "force_layout_optimization": True}
LIMIT = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
HOW: dict[str, Any] = {"fullgraph": True, "options": OPTIONS}


class Net(nn.Module):
    def __init__(self, ends: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.ends = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), ends

    def forward(self, x: Tensor) -> Any:
        return self.ends(self.b(self.a(x).relu()))


def image(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The strides of what was brought into another layout by compiled code."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        pytest.skip("inductor needs a compiler of C++")
    seen: list[tuple[int, ...]] = []
    compiled_copies = cuda_graphs._compiled_copies

    def noted() -> Callable[..., list[Tensor]]:
        quickly = compiled_copies()

        def copies(values: list[Tensor], strides: list[Any]) -> list[Tensor]:
            seen.extend(value.stride() for value in values)
            return quickly(values, strides)

        return copies

    monkeypatch.setattr(cuda_graphs, "_compiled_copies", noted)
    monkeypatch.setattr(cuda_graphs, "_is_written_over", lambda value: True)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def assert_as_eager(found: Any, expected: Any) -> None:
    for mine, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(other, Tensor):
            assert mine == other
            continue
        assert mine.dtype == other.dtype
        assert mine.stride() == other.clone().stride()
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "nested": lambda y: {"deep": (y.relu(), [y.sum(), None]), "number": 3, "one": y, "the same": y},
    "expanded": lambda y: (y.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4), y[:1].expand(3, -1, -1, -1)),
    "overlapping": lambda y: (y.unfold(2, 3, 1), y.flatten(1).as_strided((3, 3), (1, 1))),
    "gaps": lambda y: (y[:, ::2], y[:, 0], y[..., 1:]),
    "views": lambda y: (y.transpose(1, 3), y.flatten(1), y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
    "other dtypes": lambda y: (y.argmax(1), y > 0, y.half(), y.to(torch.complex64), y.shape),
    "small": lambda y: (y.mean((2, 3), keepdim=True), y.new_zeros(0, 3, 2, 2), y.sum()),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("ends", ENDS)
def test_what_is_copied_out_has_the_strides_of_eager_code(
    copied: list[Any], ends: str, layout: torch.memory_format
) -> None:
    model, x = Net(ENDS[ends]).eval().to(memory_format=layout), image().to(memory_format=layout)  # type: ignore[call-overload]
    hooked = th.FeatureLayers(model, ["a", "b"], attach=True)
    hooked.compile(**HOW)
    with torch.no_grad():
        assert_as_eager(hooked(x), th.FeatureLayers(model, ["a", "b"])(x))
    # In the graph they are as inductor likes them.
    assert layout == torch.channels_last or (2048, 1, 256, 32) in copied


@pytest.mark.slow
def test_one_tensor_stays_one_and_inputs_and_parameters_are_themselves(copied: list[Any]) -> None:
    model = Net()
    model.ends = lambda y: (y, y, model.a.weight)
    hooked, x = th.FeatureLayers(model, ["a"], attach=True), image()
    hooked.compile(**HOW)
    with torch.no_grad():
        _, (one, other, weight) = hooked(x)
    assert one is other
    assert weight is model.a.weight


@pytest.mark.slow
def test_gradients_flow_through_what_is_copied_out(copied: list[Any]) -> None:
    model = Net(lambda y: y.mean((2, 3)))
    hooked = th.FeatureLayers(model, ["a", "b"], attach=True)
    hooked.compile(**HOW)

    def gradients(wrapper: nn.Module) -> list[Tensor]:
        *features, output = tree_leaves(wrapper(image()))
        assert all(value.requires_grad for value in (*features, output))
        loss = output.square().sum() + sum(feature.square().mean() for feature in features)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for mine, other in zip(gradients(hooked), gradients(th.FeatureLayers(model, ["a", "b"])), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    assert copied == []  # the graph has eager's layout already
    assert_as_eager(hooked(image()), th.FeatureLayers(model, ["a", "b"])(image()))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_shapes_are_copied_out_too(copied: list[Any], dynamic: bool | None) -> None:
    model = Net()
    hooked = th.FeatureLayers(model, ["a"], attach=True)
    hooked.compile(dynamic=dynamic, **HOW)
    with torch.no_grad():
        for rows in (2, 3, 5):
            assert_as_eager(hooked(image(rows)), th.FeatureLayers(model, ["a"])(image(rows)))


class Broken(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        torch._dynamo.graph_break()
        return y.view(len(y), -1)  # in eager code, which counts on the layout


@pytest.mark.slow
def test_graphs_that_eager_code_goes_on_with_keep_its_layout(copied: list[Any]) -> None:
    model = Broken()
    hooked = th.FeatureLayers(model, ["a"], attach=True)
    hooked.compile(options=OPTIONS)
    with torch.no_grad():
        assert_as_eager(hooked(image()), th.FeatureLayers(model, ["a"])(image()))
    assert copied == []


@pytest.mark.slow
def test_copies_of_a_wrapper_compile_themselves(copied: list[Any]) -> None:
    hooked = th.FeatureLayers(Net(), ["a"], attach=True)
    hooked.compile(**HOW)
    other = copy.deepcopy(hooked)
    with torch.no_grad():
        assert_as_eager(other(image()), hooked(image()))
        other.compile(**HOW)
        assert_as_eager(other(image()), hooked(image()))


@pytest.mark.slow
@pytest.mark.usefixtures("copied")
def test_the_copies_of_many_graphs_are_all_compiled() -> None:
    for height in range(2, 5):
        value = torch.randn(2, 3, height, 4).to(memory_format=torch.channels_last)
        before = torch._dynamo.utils.counters["frames"]["ok"]
        with torch._dynamo.config.patch({LIMIT: 1}):
            (found,) = cuda_graphs._compiled_copies()([value], [value.contiguous().stride()])
        assert torch._dynamo.utils.counters["frames"]["ok"] == before + 1
        assert found.is_contiguous()
        assert torch.equal(found, value)


def test_gradients_flow_through_eager_copies() -> None:
    value = torch.randn(2, 3, 4, 4, requires_grad=True)
    (found,) = cuda_graphs._restrided([value], [(48, 1, 12, 3)])
    assert found.stride() == (48, 1, 12, 3)
    found.square().sum().backward()
    torch.testing.assert_close(value.grad, 2 * value)


def test_what_nothing_writes_over_is_not_copied() -> None:
    value, other = torch.ones(2, 3), torch.ones(3, 2).t()
    run = cuda_graphs._copied(lambda: (value, None, other, 3), [(3, 1), None, (3, 1), None])
    found = run()
    assert found[0] is value
    assert found[1::2] == [None, 3]
    assert found[2].stride() == (3, 1)  # inductor's layout is nobody's business


GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
]


@pytest.mark.parametrize("how", GRAPHS)
def test_the_mode_and_the_options_are_kept(how: dict[str, Any]) -> None:
    asked = {**how, "fullgraph": True, "dynamic": False}
    assert cuda_graphs.are_asked_for(asked)
    found = cuda_graphs.copying_out(asked)
    assert found is not None
    assert found.keys() == {"fullgraph", "dynamic", "backend"}
    backend = found["backend"]
    assert backend._as_asked.config["triton.cudagraphs"] is True
    assert backend._in_any_layout.config == {**backend._as_asked.config, "keep_output_stride": False}
    same = cuda_graphs.copying_out(asked)
    assert same is not None
    assert same["backend"] == backend
    other = cuda_graphs.copying_out({**asked, "dynamic": True})
    assert other is not None
    assert other["backend"] != backend


def test_without_graphs_nothing_is_copied() -> None:
    assert not cuda_graphs.are_asked_for({})
    assert not cuda_graphs.are_asked_for({"mode": "max-autotune-no-cudagraphs", "options": None})


@pytest.mark.parametrize(
    "how",
    [
        {"fullgraph": False},
        {"backend": "eager"},
        {"mode": "reduce-overhead"},  # and options: torch.compile refuses it
        {"options": {"triton.cudagraphs": True, "keep_output_stride": True}},
        {"options": {"triton.cudagraphs": True, "no_such_option": 3}},
    ],
)
def test_what_torch_does_otherwise_is_left_to_it(how: dict[str, Any]) -> None:
    assert cuda_graphs.copying_out({**HOW, **how}) is None


def test_where_torch_has_no_such_backend_everything_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_inductor", None)
    assert cuda_graphs.copying_out(HOW) is None
    monkeypatch.setattr(cuda_graphs, "_inductor", _refusing)
    assert cuda_graphs.copying_out(HOW) is None


def _refusing(mode: Any, options: Any, dynamic: Any) -> Any:
    """As one that does not know the option."""
    raise RuntimeError("Unexpected optimization option keep_output_stride")
