"""The gradient of one tensor from here on: against the derivative of what becomes of it, worked out by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from torchhook import edits
from torchhook._core.gradients import Aliases, GradTap, OutputGradient
from torchhook._core.hooks import TensorHandles
from torchhook._core.scope import Scope
from torchhook._core.taps import Tap
from torchhook.errors import NeverRanWarning


def wired(scope: Scope, handles: TensorHandles | None = None) -> tuple[GradTap, Tap, list[Any]]:
    """A gradient site: where gradients arrive, the tap that values pass, and what was seen."""
    tap, output, kept = GradTap("here", scope), Tap("output"), []
    OutputGradient(tap, handles or TensorHandles(), Aliases()).wire(output, Tap("input"))
    tap.add_look(lambda v, call: kept.append((call, v)))
    return tap, output, kept


def test_the_gradient_of_a_tensor_arrives_with_its_call() -> None:
    _, output, kept = wired(Scope())
    x = torch.ones(2, requires_grad=True)
    first, second = x * 2, x * 3
    first, second = output.take(first), output.take(second)
    (first * 5 + second * 7).sum().backward()
    assert sorted((call, grad.tolist()) for call, grad in kept) == [(0, [5.0, 5.0]), (1, [7.0, 7.0])]


def test_the_gradient_is_the_one_before_a_write_in_place() -> None:
    _, output, kept = wired(Scope())
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    y = x * 1
    output.take(y)
    y.mul_(3).relu_()
    y.sum().backward()
    assert kept[0][1].tolist() == [3.0, 0.0]


def test_an_edit_of_a_gradient_takes_its_place() -> None:
    tap, output, kept = wired(Scope())
    tap.add_edit(lambda grad, call: grad * 100)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    output.take(y)
    y.sum().backward()
    assert kept[0][1].tolist() == [100.0, 100.0]
    assert x.grad.tolist() == [200.0, 200.0]


def test_the_gradients_of_a_nested_value_arrive_in_its_structure() -> None:
    _, output, kept = wired(Scope())
    x = torch.ones(2, requires_grad=True)
    value = {"a": (x * 2, None), "b": torch.ones(1), "c": x * 3}
    value = output.take(value)
    (value["a"][0].sum() + value["c"].sum() * 4).backward()
    assert len(kept) == 1
    got = kept[0][1]
    assert got["a"][0].tolist() == [1.0, 1.0]
    assert got["a"][1] is None
    assert got["b"] is None
    assert got["c"].tolist() == [4.0, 4.0]


def test_a_value_that_needs_no_gradient_is_counted() -> None:
    tap, output, kept = wired(Scope())
    output.take(torch.ones(2))
    output.take(("text", None))
    assert tap.lacked_gradient
    assert kept == []


def test_nothing_arrives_once_the_session_is_closed() -> None:
    scope = Scope()
    tap, output, kept = wired(scope)
    tap.add_edit(lambda grad, call: grad * 100)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    output.take(y)
    output.take((y, x * 1))
    scope.closed = True
    y.sum().backward()
    assert kept == []
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_graph_that_waits_for_a_gradient_is_freed_without_the_garbage_collector() -> None:
    _, output, _ = wired(Scope())
    x = torch.ones(2, requires_grad=True)
    gc.disable()
    try:
        y = x * 2
        output.take(y)
        output.take({"a": y})
        gone = weakref.ref(y)
        del y
        assert gone() is None
    finally:
        gc.enable()


def test_handles_remove_every_hook_and_forget_those_whose_graph_is_gone() -> None:
    handles = TensorHandles()
    _, output, kept = wired(Scope(), handles)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2000):
        output.take(x * 2)
    assert len(handles._handles) < 1000
    y = x * 2
    output.take(y)
    handles.remove()
    y.sum().backward()
    assert kept == []
    assert handles._handles == []


# -- what is read, and then overwritten -----------------------------------------------------------------------------


class Head(nn.Module):
    """A layer whose output is a view of what autograd knows, for an input of three dims."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.then = nn.Linear(4, 3), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.head(x))


def centred(z: Tensor) -> Tensor:
    z -= z.mean(-1, keepdim=True)
    return z


def squashed(h: Tensor) -> Tensor:
    p = h.mean(1, keepdim=True)
    return F.relu(h, inplace=True) + p


def twice(h: Tensor) -> Tensor:
    h *= h.sigmoid()
    h += h.tanh().flip(-1)
    return h.exp_()


def part(h: Tensor) -> Tensor:
    s = h.sum()
    h[..., 1:].mul_(2)
    return h * s


def transposed(h: Tensor) -> Tensor:
    read = h.transpose(-1, -2).contiguous().sum(-1)
    h.transpose(-1, -2).mul_(3)
    return h + read.sum()


THEN = [centred, squashed, twice, part, transposed]


def moved(model: nn.Module, x: Tensor, weights: Tensor, site: str, h: float = 1e-6) -> Tensor:
    """The derivative of the score by what passes a site, element by element, by central differences."""
    with torch.no_grad(), th.capture(model, site) as rec:
        model(x)
    value = rec[site]
    found = torch.zeros_like(value)
    for i in range(value.numel()):
        step = torch.zeros_like(value).view(-1)
        step[i] = h
        scores = []
        for sign in (1, -1):
            with torch.no_grad(), th.edit(model, {site: edits.add(sign * step.view_as(value))}):
                scores.append((model(x) * weights).sum())
        found.view(-1)[i] = (scores[0] - scores[1]) / (2 * h)
    return found


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("shape", [(5, 4), (1, 2, 4), (2, 3, 4)])
@pytest.mark.parametrize("port", ["grad", "grad_input"])
def test_a_value_that_is_read_and_then_overwritten_has_the_gradient_of_both(
    then: Callable[[Tensor], Tensor], shape: tuple[int, ...], port: str
) -> None:
    if then in (squashed, transposed) and len(shape) == 2:
        shape = (1, *shape)
    model = Head(then).double()
    x, weights = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], 3, dtype=torch.float64)
    expected = moved(model, x, weights, "head" if port == "grad" else "head:input")
    with th.capture(model, f"head:{port}") as rec:
        (model(x.requires_grad_()) * weights).sum().backward()
    torch.testing.assert_close(rec[f"head:{port}"], expected, rtol=1e-6, atol=1e-7)
    if port == "grad":  # what reaches the bias is the same, summed
        torch.testing.assert_close(rec["head:grad"].flatten(0, -2).sum(0), model.head.bias.grad)


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_an_edit_of_that_gradient_changes_all_of_it(then: Callable[[Tensor], Tensor], factor: float) -> None:
    model = Head(then).double()
    x, weights = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 3).double()
    (model(x) * weights).sum().backward()
    before = model.head.bias.grad.clone()
    model.zero_grad()
    with th.edit(model, {"head:grad": edits.scale(factor)}):
        (model(x) * weights).sum().backward()
    torch.testing.assert_close(model.head.bias.grad, before * factor)


class Inside(nn.Module):
    """Uses what it returns: in one of its outputs, for a loss of its own, or not at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # Not trained: it would keep its input for that, which nobody may overwrite then.
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if self.kind == "loss":
            self.aux = self.b(h).square().mean()
            return h
        return (self.b(h), h) if self.kind == "second" else (h, self.b(h))


class Uses(nn.Module):
    def __init__(self, kind: str, then: str) -> None:
        super().__init__()
        self.kind, self.then, self.inner = kind, then, Inside(kind)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        h, other = (found, 1.0) if self.kind == "loss" else (found[1], found[0]) if self.kind == "second" else found
        score = h.mean(0, keepdim=True) * 3
        if self.then == "overwritten":
            score = score + F.relu(h, inplace=True)
        return score + other * 2 + self.inner.aux * 5


@pytest.mark.parametrize("kind", ["first", "second", "loss"])
@pytest.mark.parametrize("then", ["read", "overwritten"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_the_gradient_of_an_output_leaves_out_what_its_module_did_with_it(
    kind: str, then: str, shape: tuple[int, ...]
) -> None:
    model, x = Uses(kind, then).double(), torch.randn(shape).double()
    leaf = {"first": "0", "second": "1", "loss": ""}[kind]

    def score(bump: Tensor | float = 0.0) -> Tensor:
        edit = edits.add(bump)
        with th.edit(model, {"inner": edits.at(leaf, edit) if leaf else edit}):
            return model(x).sum()

    value = torch.zeros(shape, dtype=torch.float64)
    expected = torch.zeros_like(value)
    for i in range(value.numel()):
        step = torch.zeros_like(value)
        step.view(-1)[i] = 1e-6
        with torch.no_grad():
            expected.view(-1)[i] = (score(step) - score(-step)) / 2e-6
    with th.capture(model, "inner:grad", "inner:grad_total") as rec:
        model(x).sum().backward()
    found, total = (rec[f"inner:{port}"] for port in ("grad", "grad_total"))
    if leaf:
        found, total = found[int(leaf)], total[int(leaf)]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    # The total is what reaches the layer that made it.
    torch.testing.assert_close(total.flatten(0, -2).sum(0), model.inner.a.bias.grad)


def test_what_others_have_read_before_is_no_part_of_a_gradient_through_a_module() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.relu, self.same = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            before = h.flip(-1) * torch.arange(4)
            h = self.same(h)
            middle = h.flip(-1) * torch.arange(4) * 5
            h = self.relu(h)
            return h * 2 + before + middle

    model, x = Reads().double(), torch.randn(2, 3, 4).double()
    relu = 2 * (model.lin(x).detach() > 0).double()
    ramp = torch.arange(4).flip(-1).double().expand_as(relu)
    with th.capture(model, "relu:grad_input", "same:grad", "same:grad_input", "lin:grad", "relu:grad") as rec:
        model(x).sum().backward()
    torch.testing.assert_close(rec["relu:grad"], torch.full_like(relu, 2))
    torch.testing.assert_close(rec["relu:grad_input"], relu)
    torch.testing.assert_close(rec["same:grad"], relu + 5 * ramp)
    torch.testing.assert_close(rec["same:grad_input"], relu + 5 * ramp)
    torch.testing.assert_close(rec["lin:grad"], relu + 6 * ramp)


# -- found by random programs (tests/programs) ------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, two modules that hand on what they are given, and one that works in place."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], width: int = 4) -> None:
        super().__init__()
        self.lin, self.same, self.other = nn.Linear(width, width), nn.Identity(), nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def gradients(model: nn.Module, x: Tensor, *sites: str) -> list[Tensor]:
    """What one session captures at some sites, for the sum of what the model returns."""
    with th.capture(model, *sites) as rec:
        model(x).sum().backward()
    return [rec[site] for site in sites]


def test_a_view_that_was_written_to_through_another_can_be_listened_to() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            left, both = h[:, :2], h[:, :]
            both.mul_(3)
            return left

    model = nn.Sequential(nn.Linear(4, 4), Halves(), nn.Identity())
    x = torch.randn(2, 4)
    with th.capture(model, "1:grad", "2:grad_input") as rec:
        (model(x) * 5).sum().backward()
    assert torch.equal(rec["1:grad"], torch.full((2, 2), 5.0))
    assert torch.equal(rec["2:grad_input"], torch.full((2, 2), 5.0))
    assert model[0].bias.grad.tolist() == [60.0, 60.0, 0.0, 0.0]


def test_so_can_one_that_is_listened_to_already() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.lin(x)
        h[..., 1:] *= 0.5
        h.view_as(h).mul_(2)
        return h

    x = torch.randn(2, 3, 4)
    found = gradients(Net(forward), x, "lin:grad", "lin:grad_total", ":grad_total")
    assert torch.equal(found[2], torch.ones_like(x))
    assert torch.equal(found[0], torch.tensor([2.0, 1.0, 1.0, 1.0]).expand_as(x))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_gradient_flows_through_later_sites_first(shape: tuple[int, ...]) -> None:
    """Each of these sites listens to the same step of the graph, which the write in place has left behind."""
    model, x = Net(lambda net, x: net.relu(net.same(net.lin(x)))), torch.randn(shape)
    sites = ["lin:grad", "same:grad_input", "same:grad", "relu:grad_input", "relu:grad", ":grad"]
    model(x).sum().backward()
    plain = model.lin.bias.grad.clone()
    for k in range(len(sites)):
        model.zero_grad()
        factors = {site: edits.scale(2.0 + i) for i, site in enumerate(sites) if i >= k}
        with th.capture(model, *sites, edit=factors) as rec:
            model(x).sum().backward()
        product = 1.0
        for i, site in reversed(list(enumerate(sites))):
            product *= 2.0 + i if i >= k else 1.0
            assert rec[site].max() == product, site
        torch.testing.assert_close(model.lin.bias.grad, plain * product)


@pytest.mark.parametrize("site", ["lin:grad", "same:grad", "same:grad_input", "relu:grad", "relu:grad_input"])
def test_a_session_inside_sees_the_gradient_that_the_one_outside_has_edited(site: str) -> None:
    model, x = Net(lambda net, x: net.relu(net.same(net.lin(x))) * 5), torch.randn(2, 3, 4)
    with th.edit(model, {site: edits.scale(0.5)}), th.capture(model, site) as inside:
        model(x).sum().backward()
    with th.capture(model, site) as outside, th.edit(model, {site: edits.scale(0.5)}):
        model(x).sum().backward()
    assert (inside[site].max(), outside[site].max()) == (2.5, 5.0)


def test_so_it_does_where_several_values_leave_together() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.sin()
            return h[...], h

    model, x = nn.Sequential(Two()), torch.randn(2, 3, requires_grad=True)
    with th.edit(model, {"0:grad": edits.scale(0.5)}), th.capture(model, "0:grad") as rec:
        a, b = model(x)
        (a + 2 * b).sum().backward()
    assert torch.equal(rec["0:grad"][0], torch.full((2, 3), 0.5))
    assert torch.equal(rec["0:grad"][1], torch.full((2, 3), 1.0))


@pytest.mark.parametrize("asked", [["same:grad_total"], ["same:grad_total", "same:grad", "same:grad_input"]])
def test_a_total_does_not_depend_on_what_else_is_asked_for(asked: list[str]) -> None:
    model, x = Net(lambda net, x: x * 3 + net.same(x)), torch.randn(2, 4, requires_grad=True)
    assert torch.equal(gradients(model, x, *asked)[0], torch.full_like(x, 4))


@pytest.mark.parametrize("port", ["grad", "grad_total"])
@pytest.mark.parametrize("others", [[], ["relu:grad_input"]])
def test_what_was_written_in_place_counts_under_its_old_name_whatever_else_is_asked_for(
    port: str, others: list[str]
) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.lin(x)
        return net.relu(h) * 2 + h * 3

    x = torch.randn(2, 3, 4)
    assert torch.equal(gradients(Net(forward), x, f"relu:{port}", *others)[0], torch.full_like(x, 5))


def test_what_a_module_reads_of_what_it_wrote_is_no_part_of_the_gradient_from_there_on() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.mul_(2)
            return x, x * 10

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.writes = nn.Linear(4, 4), Writes()

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.writes(self.lin(x))
            return a + b

    x = torch.randn(2, 3, 4)
    found: Any = gradients(Whole(), x, "writes:grad")[0]
    assert all(torch.equal(grad, torch.ones_like(x)) for grad in found)


def test_a_module_that_is_given_its_input_by_name_and_returns_it_has_a_gradient_of_its_own() -> None:
    model, x = Net(lambda net, x: net.same(input=x) * 3 + x), torch.randn(2, 4, requires_grad=True)
    assert torch.equal(gradients(model, x, "same:grad")[0], torch.full_like(x, 3))


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_a_write_that_autograd_does_not_see_loses_no_gradient(leaf: bool, how: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.other(net.same(x if leaf else net.lin(x)))
        before = h * 2
        if how == "detach":
            h.detach().clamp_(-0.5, 0.5)
        else:
            with torch.no_grad():
                h.clamp_(-0.5, 0.5)
        return h * 3 + before * 0.5

    x = torch.randn(2, 3, 4, requires_grad=True)
    sites = ["same:grad", "same:grad_input", "other:grad", "other:grad_input"]
    for found in gradients(Net(forward), x.detach().requires_grad_(), *sites):
        torch.testing.assert_close(found, torch.full_like(x, 4))


@pytest.mark.parametrize("site", ["same:grad_input", "same:grad", "act:grad_input"])
def test_gradients_arrive_from_the_recomputation_of_what_first_ran_without_them(site: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.same, self.act = nn.Linear(4, 4), nn.Identity(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda h: self.act(self.same(h)) * 2, self.lin(x), use_reentrant=True)

    model, x = Checkpointed(), torch.randn(2, 4)
    expected = 2 * (1 - model.lin(x).tanh().square())
    torch.testing.assert_close(gradients(model, x, site)[0], expected.detach())


def test_a_part_that_is_called_without_the_model_follows_what_is_written() -> None:
    model = nn.ModuleDict({"part": Net(lambda net, x: net.same(net.lin(x)).mul_(3) * 2)})
    x = torch.randn(2, 3, 4)
    with th.capture(model, "part.same:grad", "part:grad") as rec:
        model["part"](x).sum().backward()
    assert torch.equal(rec["part.same:grad"], torch.full_like(x, 6))


class Half(torch.autograd.Function):
    """Has no gradient for its second input."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_where_no_gradient_comes_nothing_is_edited_or_kept() -> None:
    """Torch calls hooks with ``None`` there (pytorch#11751)."""
    model, x = Net(lambda net, x: Half.apply(x, net.lin(x) + net.other.weight)), torch.randn(2, 4, requires_grad=True)
    model.other.weight = nn.Parameter(torch.zeros(4))
    factors = {"lin:grad": edits.scale(2.0), "other.weight:grad": edits.scale(2.0)}
    with pytest.warns(NeverRanWarning, match="2 selected sites"):
        with th.capture(model, *factors, edit=factors) as rec:
            model(x).sum().backward()
    assert "lin:grad" not in rec
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_view_that_autograd_has_given_up_is_left_alone() -> None:
    """Even to ask for its step raises then, and nobody else had asked."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.lin(x)
        kept = checkpoint(lambda t: t, h, use_reentrant=True)
        h.mul_(2)
        net.same(kept)
        return h

    x = torch.randn(3, 4)
    found = gradients(Net(forward), x, "lin:grad")
    assert torch.equal(found[0], torch.full_like(x, 2))
    model = Net(forward)
    with pytest.warns(NeverRanWarning, match="3 selected sites"):
        with th.capture(model, "same:grad", "same:grad_input", "same:grad_total"):
            model(x).sum().backward()


def test_an_alias_has_the_strides_of_the_tensor() -> None:
    odd = torch.randn(1, 2, 4, requires_grad=True).flip(-1).as_strided((1, 2, 4), (3, 4, 1))
    net = nn.Identity()
    with th.capture(net, ":grad"):
        out = net(odd)
        out.sum().backward()
    assert out is not odd
    assert out.stride() == (3, 4, 1)
    assert out.grad_fn is not None
