"""Memory that outlives the forward pass is never shared, and mostly known without looking through the model.

A buffer, or what the model was called with, may be seen through a numpy array: after a write that array must show what
the tensor shows, and the recording what was there before. A value that only the running call holds is none of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook._core import keep, taps
from torchhook._core.index import Index
from torchhook._torch import hooks
from torchhook._values import tree

is_cow: Callable[[Tensor], bool] = torch._C._is_cow_tensor


@pytest.fixture(params=["counting", "not counting"])
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test that takes this runs twice: as Python is, and as if counting references told nothing."""
    if request.param == "not counting":
        monkeypatch.setattr(taps, "held_by_call", -1)
        monkeypatch.setattr(keep, "held_by_view", -1)
        monkeypatch.setattr(keep, "held_by_tuple", -1)
    return request.param == "counting"


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plain_ids", "owned"):
        monkeypatch.setattr(Index, name, lambda self, name=name: pytest.fail(f"{name} looks at every module"))


class Layer(nn.Module):
    """Returns what a function makes of its input and its own buffer."""

    def __init__(self, make: Callable[[Layer, Any], Any]) -> None:
        super().__init__()
        self.register_buffer("own", torch.arange(6.0).reshape(2, 3))
        self.make, self.seen = make, list[Any]()

    def forward(self, x: Any) -> Any:
        return self.make(self, x)


class Model(nn.Module):
    def __init__(self, make: Callable[[Layer, Any], Any]) -> None:
        super().__init__()
        self.layer, self.fc = Layer(make), nn.Linear(3, 3)
        self.register_buffer("other", torch.ones(2, 3))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


MADE: dict[str, Callable[[Layer, Any], Any]] = {
    "new": lambda layer, x: x * 2,
    "new, once a local": lambda layer, x: (lambda y: y)(x + 1),
    "a view of new": lambda layer, x: (x * 2).view(-1),
    "a view of a view": lambda layer, x: (x * 2).view(-1).view(3, 2),
    "an activation": lambda layer, x: torch.relu(x - 1).softmax(-1),
    "a tuple": lambda layer, x: (x * 2, None, (x + 1).t()),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
@pytest.mark.parametrize("alone", [True, False])
def test_what_a_layer_makes_is_kept_without_a_look_at_the_others(
    make: Callable[[Layer, Any], Any], grad: bool, alone: bool, no_walk: None
) -> None:
    model, x = Model(make), torch.randn(2, 3, requires_grad=grad)
    truth: list[Any] = []
    model.layer.register_forward_hook(lambda m, args, out: truth.append(tree.map_tensors(Tensor.clone, out)))
    with torch.set_grad_enabled(grad), th.capture(model, "layer") as rec:
        (model.layer if alone else model)(x)
    found, expected = list(tree.tensors(rec["layer"])), list(tree.tensors(truth[0]))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(is_cow(one) and not one.requires_grad for one in found)


OUTLIVING: dict[str, Callable[[Layer, Any], Any]] = {
    "its buffer": lambda layer, x: layer.own,
    "a view of its buffer": lambda layer, x: layer.own.view(-1),
    "its buffer, turned": lambda layer, x: layer.own.t(),
    "its buffer in a tuple": lambda layer, x: (layer.own,),
    "a view of its buffer in a tuple": lambda layer, x: (layer.own.view(-1), x * 2),
    "its buffer in a list": lambda layer, x: [layer.own],
    "its buffer, written to": lambda layer, x: layer.own.add_(1),
    "its input": lambda layer, x: x,
    "its input in a tuple": lambda layer, x: (x,),
    "a view of its input": lambda layer, x: x.view(-1),
}
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("make", OUTLIVING.values(), ids=list(OUTLIVING))
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_arrays_of_what_outlives_the_pass_follow_it(make: Any, mode: Callable[[], Any], counts: bool) -> None:
    model, x = Model(make), torch.ones(2, 3)
    arrays = [x.numpy(), model.layer.own.numpy()]
    with mode(), th.capture(model, "layer") as rec:
        model(x)
    before = [value.clone() for value in tree.tensors(rec["layer"])]
    for tensor, array in zip((x, model.layer.own), arrays, strict=True):
        tensor.add_(5)
        assert array.tolist() == tensor.tolist()
    assert all(torch.equal(one, other) for one, other in zip(tree.tensors(rec["layer"]), before, strict=True))


def test_a_buffer_that_an_earlier_hook_puts_in_the_place_of_the_output_is_not_shared(counts: bool) -> None:
    model = Model(lambda layer, x: x * 2)
    array = model.other.numpy()
    model.layer.register_forward_hook(lambda m, args, out: model.other)
    with th.capture(model, "layer") as rec:
        model(torch.ones(2, 3))
    model.other.add_(1)
    assert array.tolist() == model.other.tolist()
    assert rec["layer"].tolist() == torch.ones(2, 3).tolist()


def test_a_tuple_that_the_model_is_called_with_and_returns_is_not_shared(counts: bool) -> None:
    model, pair = Model(lambda layer, x: x), (torch.ones(3), torch.zeros(3))
    array = pair[0].numpy()
    with th.capture(model, "layer") as rec:
        model(pair)
    pair[0].add_(1)
    assert array.tolist() == [2, 2, 2]
    assert rec["layer"][0].tolist() == [1, 1, 1]


def test_a_layer_that_returns_what_was_kept_before_it_needs_no_look_either(no_walk: None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Identity()).eval()
    x = torch.randn(2, 3)
    with torch.no_grad(), th.capture(model, "*") as rec:
        expected = model(x)
    assert all(torch.equal(rec[str(i)], expected) for i in range(3))
    assert all(is_cow(rec[str(i)]) for i in range(3))


def test_what_is_written_to_in_place_is_kept_as_it_was(counts: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Hardtanh(0, 0.1, inplace=True))
    truth: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda m, args, out: truth.append(out.detach().clone()))
    with torch.no_grad(), th.capture(model, "*") as rec:
        model(torch.randn(4, 3))
    assert all(torch.equal(rec[str(i)], truth[i]) for i in range(3))


# -- counting -----------------------------------------------------------------------------------------


def test_references_tell_with_this_python_and_torch() -> None:
    assert min(hooks.held_by_call, hooks.held_by_view, hooks.held_by_tuple) > 0


def test_where_one_more_holder_does_not_show_nothing_is_counted_on() -> None:
    assert hooks._counted(lambda hold: 7) == -1
    assert hooks._counted(lambda hold: 7 + 2 * hold) == -1
    assert hooks._counted(lambda hold: 1 // 0) == -1
    assert hooks._counted(lambda hold: 7 + hold) == 7


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_nothing_is_counted_on_while_hooks_of_all_modules_may_hold_what_passes(kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *call: None)
    try:
        assert hooks._counted(lambda hold: 7 + hold) == -1
    finally:
        handle.remove()
    assert hooks._counted(lambda hold: 7 + hold) == 7


def test_nothing_is_counted_on_where_nobody_knows_of_such_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_GLOBAL", ("_global_hooks_of_a_later_torch",))
    assert hooks._counted(lambda hold: 7 + hold) == -1


@pytest.mark.parametrize("pattern", ["*", "*.*", "*.**", "**", "**.0", "0.*.**", "*.0"])
def test_a_glob_finds_leaves_and_containers_as_its_regular_expression_does(pattern: str) -> None:
    from torchhook._core.index import glob_pattern

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    matches = glob_pattern(pattern).fullmatch
    expected = {name: module for name, module in model.named_modules() if name and matches(name + ".")}
    assert dict(Index(model).matching(pattern)) == expected
