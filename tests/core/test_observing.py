"""One hook that looks at a module's output and its gradient, beside the taps that do it apart and beside autograd."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchhook import edits
from torchhook._core import observing
from torchhook._core.index import Index
from torchhook._core.observing import can_observe, go_on, observe
from torchhook._core.select import resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target

Seen = dict[str, list[Tensor]]


def watched(model: nn.Module, apart: bool) -> tuple[Session, Seen]:
    """A session that clones every output and every gradient, by one hook or by taps of their own."""
    index = Index(model)
    session, seen = Session(model, index=index, warn=False), Seen()
    for target in resolve(index, "**"):
        names = str(target.site), f"{target.site}:grad"
        looks = [look(seen, name) for name in names]
        if apart:
            session.look(target, looks[0])
            session.look(target._replace(site=target.site.but(port="grad")), looks[1])
        else:
            assert can_observe(session, target)
            observe(session, target, looks[0], looks[1])
    return session, seen


def look(seen: Seen, name: str) -> Callable[[Any, int], None]:
    def note(value: Any, call: int) -> None:
        seen.setdefault(name, []).append(value.detach().clone() if isinstance(value, Tensor) else value[0].clone())

    return note


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm(self.conv(x)))
        out = self.inner(out)
        out += x
        return self.relu(out)


class Odd(nn.Module):
    """Hands on what it is given, views of it, several values, and values that were used before."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.flat, self.fc, self.pair = nn.Identity(), nn.Flatten(), nn.Linear(48, 4), Pair()
        self.used, self.late = Used(), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        y = self.same(x)
        first, second = self.pair(self.fc(self.flat(y + x)))
        return self.late(self.used(first)) + second


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:, :4]


class Used(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = x * 3
        made.square().sum()
        self.kept = made * 5
        return made


class Written(nn.Module):
    """Activations in place: behind a layer, of a view, of what was used before, by keyword, and one after the other."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        kinds = [kind for kind in sorted(observing._WRITE, key=str) if kind is not nn.Mish]
        self.chain = nn.Sequential(*[part for kind in kinds for part in (nn.Linear(8, 8), kind(inplace=inplace))])
        self.relu, self.silu, self.last = nn.ReLU(inplace), nn.SiLU(inplace), nn.Mish(inplace)
        self.odd = nn.ReLU(inplace)
        self.odd.forward = lambda x: x  # type: ignore[method-assign]  # hands on what it is given

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.chain(x))
        left, right = (x * 2)[:, :4], x * 3
        used = right + 1
        left = self.silu(self.relu(left) + 0.5)
        under = (x * 4)[:, 2:6]
        self.relu(under)  # and read under its old name
        left = left + under
        return left * self.last(input=x + used)[:, 4:] + self.relu(right)[:, :4]


class Saving(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x.requires_grad_(), use_reentrant=self.reentrant)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x=x) if False else self.a(x))


IMAGES = (2, 3, 4, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (lambda: nn.Sequential(Residual(), Residual()), IMAGES),
    "odd": (lambda: nn.Sequential(Odd()), IMAGES),
    "checkpoint": (lambda: nn.Sequential(Saving(False)), (3, 4)),
    "reentrant checkpoint": (lambda: nn.Sequential(Saving(True)), (3, 4)),
    "frozen": (lambda: nn.Sequential(Frozen()), (3, 4)),
    "activations": (lambda: nn.Sequential(Written()), (3, 8)),
    "activations of new memory": (lambda: nn.Sequential(Written(inplace=False)), (3, 8)),
    "rnn": (lambda: nn.Sequential(nn.LSTM(4, 4)), (3, 4)),
}


def run(model: nn.Module, shape: tuple[int, ...]) -> None:
    output = model(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    leaf = output if isinstance(output, Tensor) else output[0]
    leaf.square().sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_it_sees_what_taps_of_their_own_see_over_several_rounds(name: str) -> None:
    make, shape = MODELS[name]
    found = []
    for apart in (True, False):
        torch.manual_seed(0)
        model = make()
        session, seen = watched(model, apart)
        session.open()
        for _ in range(3):
            run(model, shape)
            if not apart:
                go_on(session)
        session.close()
        found.append(seen)
    expected, seen = found
    assert seen.keys() == expected.keys()
    for site, tensors in expected.items():
        assert len(seen[site]) == len(tensors), site
        for one, other in zip(seen[site], tensors, strict=True):
            torch.testing.assert_close(one, other, msg=site)


def test_gradients_are_those_of_autograd_in_a_twin_without_in_place_layers() -> None:
    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace), nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(inplace)))

    x, twin, values = torch.randn(IMAGES), net(False), {}
    value = x
    for name, module in (("0", twin[0]), ("1", twin[1]), ("2.0", twin[2][0]), ("2.1", twin[2][1])):
        values[name] = value = module(value)
    expected = dict(zip(values, torch.autograd.grad(value.square().sum(), list(values.values())), strict=True))
    expected["2"] = expected["2.1"]
    model = net(True)
    session, seen = watched(model, apart=False)
    session.open()
    model(x).square().sum().backward()
    session.close()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[f"{name}:grad"], [gradient])


def test_activations_in_place_need_nobody_before_them_and_calls_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Flatten(0))
    index, calls = Index(model), list[tuple[str, int]]()
    session = Session(model, index=index, warn=False)
    for target in resolve(index, "**"):
        name = str(target.site)
        observe(session, target, lambda value, call, name=name: calls.append((name, call)), lambda value, call: None)
    with session:
        assert [bool(module._forward_pre_hooks) for module in model] == [False, False, True]
        for _ in range(2):
            model(torch.ones(2, 3))
        with torch.no_grad():
            model(torch.ones(2, 3))
    assert calls == [(name, call) for call in range(3) for name in ("0", "1", "2")]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("site", ["1", "1.1", "0"])
def test_an_edit_of_a_gradient_is_seen_as_by_taps_of_their_own(apart: bool, site: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())), torch.randn(2, 3)
    session, seen = watched(model, apart)
    session.open()
    other = Session(model)
    (target,) = resolve(other.index, f"{site}:grad")
    other.edit(target, edits.scale(10.0))
    other.open()
    model(x).square().sum().backward()
    other.close()
    session.close()
    plain, bare = watched(model, True)
    plain.open()
    model.zero_grad()
    model(x).square().sum().backward()
    plain.close()
    # Whoever came later at the same site comes later; what lies before it in the model sees what was made of it.
    edited = {"1": ("1.1", "1.0", "0"), "1.1": ("1.0", "0"), "0": ()}[site]
    for name in ("0", "1.0", "1.1", "1"):
        factor = 10.0 if name in edited else 1.0
        torch.testing.assert_close(seen[f"{name}:grad"][0], bare[f"{name}:grad"][0] * factor, msg=name)


def test_nothing_is_left_on_tensors_and_graphs_that_live_on_are_not_heard() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    session, seen = watched(model, apart=False)
    session.open()
    older = model(torch.ones(2, 3))
    go_on(session)
    output = model(torch.ones(2, 3))
    older.sum().backward()
    assert "0:grad" not in seen
    session.close()
    output.sum().backward()
    assert "0:grad" not in seen
    assert not older._backward_hooks
    assert not output._backward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_graphs_are_freed_and_what_is_known_of_them_is_forgotten_in_time() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3))
    session, _ = watched(model, apart=False)
    session.open()
    for _ in range(300):
        output = model(torch.ones(2, 3))
    assert len(session.handles.results) < 200
    node = weakref.ref(output.grad_fn.metadata.setdefault("mark", type("Mark", (), {})()))
    gc.disable()
    try:
        del output
        assert node() is None
    finally:
        gc.enable()
    session.close()


def test_where_torch_keeps_hooks_otherwise_taps_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    session = Session(model)
    target: Target = resolve(session.index, "0")[0]
    assert can_observe(session, target)
    monkeypatch.setattr(observing, "knows_results", False)
    assert not can_observe(session, target)
    monkeypatch.undo()
    session.look(target, lambda value, call: None)
    assert not can_observe(session, target)  # it has a tap already
