"""A compiled side: its layers run eagerly, and the compiled code itself once, as it is. The oracle calls it by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diff.nets import image, net
from torchhook._capture import capture, run
from torchhook._diff.api import diff

pytestmark = pytest.mark.filterwarnings("ignore::torchhook.errors.CompiledWarning")

COMPILED = "(compiled output)"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrong(graph: Any, examples: Any) -> Callable[..., Any]:
    """A compiler whose code gives back twice what it should."""
    return lambda *args: tuple(made * 2 for made in graph.forward(*args))


class Pair(nn.Sequential):
    """Of a class of its own: torch compiles no ``nn.Sequential`` in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))  # type: ignore[no-any-return]


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Pair(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)


def in_place(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    other.compile(backend=wrong)
    return other


@pytest.mark.parametrize("made", [lambda model: torch.compile(model, backend=wrong), in_place])
def test_wrong_compiled_code_is_found_and_the_error_is_that_of_a_call_by_hand(made: Any) -> None:
    model, x = small()
    compiled = made(model)
    expected = (compiled(x) - model(x)).abs().max().item()
    assert expected > 0.1
    found = diff(model, compiled, x)
    assert not found.ok
    assert found.first is found[COMPILED]
    assert found.first.max_abs == pytest.approx(expected)
    assert [row.site for row in found if row.ok] == ["0", "1", ""]
    assert "1 differs, the first at (compiled output)" in str(found)
    assert COMPILED in found._repr_html_()
    assert "ran eagerly" in str(found)
    assert "ran eagerly" in found._repr_html_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("local", [False, True])
def test_honest_compiled_code_is_the_same(backend: str, local: bool) -> None:
    model = net()
    found = diff(model, torch.compile(copy.deepcopy(model), backend=backend), image(), local=local)
    assert found.ok, found
    assert [row.site for row in found][-2:] == ["", COMPILED]
    assert diff(torch.compile(model, backend=backend), copy.deepcopy(model), image(), local=local).ok


def test_the_compiled_code_runs_once_and_not_in_a_session() -> None:
    model, x = small()
    runs: list[int] = []

    def counting(graph: Any, examples: Any) -> Callable[..., Any]:
        def ran(*args: Any) -> Any:
            runs.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
            return graph.forward(*args)

        return ran

    assert diff(copy.deepcopy(model), torch.compile(model, backend=counting), x).ok
    assert runs == [0]


def test_a_forward_that_was_compiled_by_itself_is_found() -> None:
    model, x = small()
    other = copy.deepcopy(model)
    other.forward = torch.compile(other.forward, backend=wrong)  # type: ignore[method-assign]
    found = diff(model, other, x)
    assert not found.ok
    assert found.first is not None
    assert found.first.site == COMPILED


def test_wrong_code_of_the_reference_is_found_too() -> None:
    model, x = small()
    first = diff(torch.compile(copy.deepcopy(model), backend=wrong), model, x).first
    assert first is not None
    assert first.site == COMPILED
    # Twice on both sides is the same.
    both = [torch.compile(copy.deepcopy(model), backend=wrong) for _ in range(2)]
    assert diff(*both, x).ok


def test_a_part_that_is_compiled_shows_in_the_output_of_the_model() -> None:
    model, x = small()
    other: Any = copy.deepcopy(model)
    other[0] = torch.compile(other[0], backend=wrong)
    found = diff(model, other, x)
    assert [row.site for row in found if not row.ok] == [COMPILED]
    assert found[COMPILED].max_abs == pytest.approx((other(x) - model(x)).abs().max().item())


def test_a_layer_that_differs_is_named_before_the_compiled_code_around_it() -> None:
    model = net()
    port: Any = copy.deepcopy(model)
    with torch.no_grad():
        port.conv2.bias += 0.5
    found = diff(model, torch.compile(port, backend="eager"), image())
    assert found.first is not None
    assert found.first.site == "conv2"
    assert not found[COMPILED].ok


def test_recordings_and_arrays_are_compared_with_the_compiled_output() -> None:
    model, x = small()
    _, rec = run(model, x, capture=["0", ""])
    compiled = torch.compile(model, backend=wrong)
    honest = torch.compile(copy.deepcopy(model), backend="eager")
    for found in (diff(rec, compiled, x), diff(compiled, rec, x), diff({"": rec[""].numpy()}, compiled, x)):
        assert [row.site for row in found if not row.ok] == [COMPILED]
    assert diff(rec, honest, x).ok
    assert diff(honest, rec, x)[COMPILED].ok


def test_where_the_output_is_not_compared_the_table_says_that_the_compiled_code_did_not_run() -> None:
    model, x = small()
    compiled = torch.compile(copy.deepcopy(model), backend=wrong)
    found = diff(model, compiled, x, sites="0")
    assert [row.site for row in found] == ["0"]
    assert "its compiled code did not run" in str(found)
    assert not diff(model, compiled, x, sites=["0", ""]).ok


def test_inside_a_session_compiled_code_cannot_run_and_that_is_said() -> None:
    model, x = small()
    compiled = torch.compile(copy.deepcopy(model), backend=wrong)
    with capture(compiled, "0"):
        found = diff(model, compiled, x)
    assert COMPILED not in [row.site for row in found]
    assert "its compiled code did not run" in str(found)
    assert not diff(model, compiled, x).ok


def test_buffers_modes_gradients_and_random_numbers_are_left_as_they_were() -> None:
    model = net().train()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager")
    before = copy.deepcopy(other.state_dict())
    state = torch.get_rng_state()
    found = diff(model, compiled, image(), exclude="drop")
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in other.modules())
    assert all(parameter.grad is None for parameter in other.parameters())
    assert found["bn"].ok
