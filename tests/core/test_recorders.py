"""Sessions that only record make their taps together; whatever else is asked for is still done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits
from torchhook._core.index import Index
from torchhook._core.select import resolve
from torchhook._core.session import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def by_hand(net: Net, x: Tensor) -> dict[str, Tensor]:
    truth: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: truth.__setitem__(name, out.detach().clone()))
        for name, module in net.named_children()
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return truth


def only_records(session: Session) -> bool:
    return session._taps.recorders is not None


ALONE: dict[str, Callable[[nn.Module], Session]] = {
    "names": lambda net: th.capture(net, "a", "act"),
    "everything": lambda net: th.capture(net),
    "a few of each": lambda net: th.capture(net, "**", max_records=2),
    "on the host": lambda net: th.capture(net, "**", device="cpu"),
    "the end of the pass": lambda net: th.capture(net, "a", "act", stop=True),
}
MORE: dict[str, Callable[[nn.Module], Session]] = {
    "inputs": lambda net: th.capture(net, "a", "act:input"),
    "a call": lambda net: th.capture(net, "a#0"),
    "gradients": lambda net: th.capture(net, "a", "b:grad"),
    "parameters": lambda net: th.capture(net, "a", "b.weight"),
    "operations": lambda net: th.capture(net, "a/linear"),
    "edits": lambda net: th.capture(net, "a", edit={"a": edits.zero()}),
    "transforms": lambda net: th.capture(net, "a", transform=lambda value: value + 1),
    "values on the graph": lambda net: th.capture(net, "a", keep="live"),
    "before edits": lambda net: th.capture(net, "a", before_edits=True),
}


@pytest.mark.parametrize("make", ALONE.values(), ids=ALONE.keys())
def test_values_of_whole_modules_alone_are_recorded_by_the_short_way(
    make: Callable[[nn.Module], Session], net: Net
) -> None:
    x = torch.randn(2, 3)
    truth = by_hand(net, x)
    session = make(net)
    assert only_records(session)
    for _ in range(3):
        with session as rec:
            net(x)
        assert [site for site in rec if site] == [site for site in session.sites if site]
        for site in rec:
            if site:
                assert torch.equal(rec[site], truth[site])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("make", MORE.values(), ids=MORE.keys())
def test_who_does_more_goes_the_long_way(make: Callable[[nn.Module], Session], net: Net) -> None:
    session = make(net)
    assert not only_records(session)
    session.unopened = ""


def test_what_is_asked_for_after_the_recording_is_done_too(net: Net) -> None:
    seen: list[Any] = []
    session = Session(net)
    targets = resolve(Index(net), "*")
    session.record(targets, th.capture(net, "a").open()._keeps[0])
    session.look(targets[1], lambda value, call: seen.append(value.clone()))
    session.edit(targets[0], edits.scale(2.0))
    x = torch.randn(2, 3)
    with session as rec:
        net(x)
    assert torch.equal(rec["a"], 2 * net.a(x))
    assert torch.equal(seen[0], rec["act"])
    assert torch.equal(rec["act"], (2 * net.a(x)).relu())


def test_one_module_under_two_names_is_recorded_under_both(net: Net) -> None:
    net.again = net.a  # type: ignore[assignment]
    targets = [*resolve(Index(net), "a"), *resolve(Index(net), "again")]
    session = Session(net)
    session.record(targets, th.capture(net, "a").open()._keeps[0])
    x = torch.randn(2, 3)
    with session as rec:
        net(x)
    assert torch.equal(rec["a"], net.a(x))
    assert torch.equal(rec["again"], net.a(x))


def test_a_site_that_is_read_while_the_session_is_open_changes_nothing(net: Net) -> None:
    session = th.capture(net, "a", "b")
    with session as rec:
        assert session.sites == ["a", "b"]
        net.a(torch.ones(1, 3))
        net.b(torch.ones(1, 3))
    assert list(rec) == ["a", "b"]
    assert not rec.missing


def test_a_session_may_be_told_twice_what_to_record(net: Net) -> None:
    session, x = Session(net), torch.randn(2, 3)
    keep = th.capture(net, "a").open()._keeps[0]
    session.record(resolve(session.index, "a"), keep)
    session.record(resolve(session.index, "b"), keep)
    with session as rec:
        net(x)
    truth = by_hand(net, x)
    assert list(rec) == ["a", "b"]
    assert torch.equal(rec["a"], truth["a"])
    assert torch.equal(rec["b"], truth["b"])
