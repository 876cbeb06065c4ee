"""What a container computes between its layers: ``local=True`` names it, a plain diff says who made an input."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook._diff.api import diff


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.act: Callable[[Tensor], Tensor] = F.gelu
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(x)))


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).eval()


def pair(count: int = 4) -> tuple[Any, Any]:
    model = blocks(count)
    return model, copy.deepcopy(model)


X = torch.linspace(-2, 2, 12).reshape(3, 4)


def wrong(found: Any) -> list[str]:
    return [row.site for row in found if not row.ok]


def input_of(model: Any, block: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in model[:block]:
            x = layer(x)
    return x


def test_code_between_two_layers_is_the_containers() -> None:
    a, b = pair()
    b[2].act = F.relu
    found = diff(a, b, X, local=True)
    assert not found.ok
    assert wrong(found) == ["2"]
    # By hand: what '2.down' is given, from the same input and the same '2.up'.
    up = a[2].up(input_of(a, 2, X))
    assert found["2"].max_abs == pytest.approx((F.gelu(up) - F.relu(up)).abs().max().item(), rel=1e-5)
    assert "what its own code gives to '2.down' differs" in found["2"].note
    assert found["2"].elements == up.numel()


def test_code_behind_the_last_layer_is_the_containers() -> None:
    a, b = pair()
    b[1].scale = 2.0
    found = diff(a, b, X, local=True)
    assert wrong(found) == ["1"]
    x = input_of(a, 1, X)
    assert found["1"].max_abs == pytest.approx(a[1].down(F.gelu(a[1].up(x))).abs().max().item(), rel=1e-5)


def test_a_layer_that_differs_is_not_put_down_to_the_code_around_it() -> None:
    a, b = pair()
    with torch.no_grad():
        b[2].up.bias += 0.5
    found = diff(a, b, X, local=True)
    assert wrong(found) == ["2.up"]


def test_a_layer_and_the_code_around_it_are_told_apart() -> None:
    a, b = pair()
    b[2].act = F.relu
    with torch.no_grad():
        b[2].up.bias += 0.5
        b[3].down.bias += 0.5
    assert wrong(diff(a, b, X, local=True)) == ["2.up", "2", "3.down"]


def test_the_row_of_the_model_says_what_b_makes_by_itself() -> None:
    a, b = pair()
    b[2].act = F.relu
    row = diff(a, b, X, local=True)[""]
    assert row.status == "same"  # its own code is
    expected = (a(X) - b(X)).abs().max().item()
    assert f"B by itself: max error {expected:.2e}" in row.note


def test_the_code_of_the_model_itself() -> None:
    class Net(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x) + self.shift)

    a, b = Net(0.0), Net(0.25)
    b.load_state_dict(a.state_dict())
    found = diff(a, b, X, local=True)
    assert wrong(found) == [""]
    assert found[""].max_abs == pytest.approx(0.25, abs=1e-6)
    assert "what its own code gives to 'layers.1' differs" in found[""].note


@dataclasses.dataclass
class Held:
    value: Tensor


class Holding(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Held(super().forward(x))


def test_what_no_single_module_shows_is_a_difference_all_the_same() -> None:
    class Net(nn.Module):
        """Its first layer gives back an object, into which nothing is put: what follows may come from there."""

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.first, self.last = Holding(4, 4), nn.Linear(4, 4)
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.factor * self.first(x).value)

    a, b = Net(1.0), Net(2.0)
    b.load_state_dict(a.state_dict())
    found = diff(a, b, X, local=True)
    assert wrong(found) == [""]
    expected = (a(X) - b(X)).abs().max().item()
    assert found[""].max_abs == pytest.approx(expected, rel=1e-5)
    assert found[""].note == f"B by itself: max error {expected:.2e}, by nothing that one module shows"


def test_writing_in_place_reaches_the_code_around() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            self.relu(y)
            return self.last(y) + y

    torch.manual_seed(0)
    a = Net().eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.fc.bias += 0.5
    assert wrong(diff(a, b, X, local=True)) == ["fc"]


def test_rounding_is_not_put_down_to_the_code_that_hands_it_on() -> None:
    a, b = pair()
    found = diff(a, b.bfloat16(), X, local=True)
    assert not any("its own code" in row.note for row in found)
    assert found.ok


def test_a_module_that_only_b_has_is_a_part_of_the_code_around_it() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 0.5)

    a = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    b = nn.Sequential(copy.deepcopy(a[0]), Wrapped(copy.deepcopy(a[1])))
    found = diff(a, b, X, names={"1": "1.inner"}, local=True)
    assert wrong(found) == [""]
    assert "what its own code gives to '1.inner' differs" in found[""].note


def test_each_call_of_a_shared_block_has_its_own_row() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.late = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            if self.late:
                self.block.act = F.relu
            return self.block(y)

    torch.manual_seed(0)
    a = Twice().eval()
    b = copy.deepcopy(a)
    b.late = True
    assert wrong(diff(a, b, X, local=True)) == ["block#1"]


# -- without local ------------------------------------------------------------------------------------------


def test_a_plain_diff_says_that_the_input_of_the_first_differs_and_who_made_it() -> None:
    a, b = pair()
    b[2].act = F.relu
    first = diff(a, b, X).first
    assert first is not None
    assert (first.site, first.note) == ("2.down", "its input differs already: made in '2'")


def test_a_layer_that_differs_by_itself_is_not_said_to_get_another_input() -> None:
    a, b = pair()
    with torch.no_grad():
        b[2].up.bias += 0.5
    first = diff(a, b, X).first
    assert first is not None
    assert (first.site, first.note) == ("2.up", "")


def test_code_of_the_model_before_a_block_is_the_models() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])
            self.shift = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x) + self.shift)

    torch.manual_seed(0)
    a = Net()
    b = copy.deepcopy(a)
    b.shift = 0.5
    first = diff(a, b, X).first
    assert first is not None
    assert (first.site, first.note) == ("layers.1.up", "its input differs already: made in '(model)'")


def test_other_inputs_are_nobodys_doing() -> None:
    a, b = pair()
    first = diff(a, b, X, inputs_b=X + 1).first
    assert first is not None
    assert (first.site, first.note) == ("0.up", "its input differs already")


def test_of_several_calls_the_one_that_differs_is_asked() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.shift = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x) + self.shift)

    a = Net()
    b = copy.deepcopy(a)
    b.shift = 0.5
    first = diff(a, b, X).first
    assert first is not None
    assert (first.site, first.note) == ("fc#1", "its input differs already: made in '(model)'")
