"""A transform for each site, by selectors: what is kept is what bare hooks and the function itself give."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import ids, small_gpt2
from torchhook import transforms
from torchhook.errors import SelectorError


class Net(nn.Module):
    """A module that is called twice, one under two names, and one that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.twin = self.second
        self.lstm = nn.LSTM(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x = self.relu(self.second(x) - 1)
        return self.lstm(x)[0].sum(-1)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))


def by_hand(net: Net, x: Tensor) -> dict[str, Any]:
    """What each module returned, in clones; of the one that is called twice, a list."""
    seen: dict[str, Any] = {"relu": []}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, Tensor) else output[0]
            value = parts.detach().clone()
            seen["relu"].append(value) if name == "relu" else seen.__setitem__(name, value)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in net.named_children()]
    net(x)
    for handle in handles:
        handle.remove()
    return seen


def narrow(value: Tensor) -> Tensor:
    return value[..., :2]


def mean(value: Tensor) -> Tensor:
    return value.mean(-1)


WAYS: list[Any] = [
    lambda net: {"first": narrow, "second": mean},
    lambda net: {"fi*": narrow, "*con*": mean},
    lambda net: {nn.Linear: narrow, "second": mean},
    lambda net: {net.first: narrow, net.second: mean},
    lambda net: {re.compile("^fir"): narrow, (lambda name, module: name == "second"): mean},
    lambda net: {("first", "lstm"): narrow, "twin": mean},
    lambda net: {th.types.Site("first"): narrow, "second": mean},
]


@pytest.mark.parametrize("way", WAYS)
def test_every_selector_may_be_a_key_and_what_none_means_is_kept_whole(net: Net, x: Tensor, way: Any) -> None:
    truth = by_hand(net, x)
    with th.capture(net, "first", "second", "relu", "lstm:output.0", transform=way(net)) as rec:
        net(x)
    assert rec.keys() == ["first", "relu", "second", "lstm:output.0"]
    assert torch.equal(rec["first"], truth["first"][..., :2])
    assert torch.equal(rec["second"], truth["second"].mean(-1))
    assert [torch.equal(*pair) for pair in zip(rec.all("relu"), truth["relu"], strict=True)] == [True, True]
    assert torch.equal(rec["lstm:output.0"], truth["lstm"])


def test_run_takes_a_mapping_too(net: Net, x: Tensor) -> None:
    truth = by_hand(net, x)
    output, rec = th.run(net, x, capture=["first", "second"], transform={"second": narrow}, stop=True)
    assert isinstance(output, th.types.Stopped)
    assert torch.equal(rec["first"], truth["first"])
    assert torch.equal(rec["second"], truth["second"][..., :2])


def test_an_address_comes_before_a_glob_and_none_keeps_a_site_whole(net: Net, x: Tensor) -> None:
    truth = by_hand(net, x)
    for keys in ({"*": narrow, "second": None}, {"second": None, "*": narrow}):
        _, rec = th.run(net, x, capture=["first", "second"], transform=keys)
        assert torch.equal(rec["first"], truth["first"][..., :2])
        assert torch.equal(rec["second"], truth["second"])


def test_a_key_means_the_port_that_is_captured(net: Net, x: Tensor) -> None:
    inputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0].clone()}))
        for name, module in (("first", net.first), ("second", net.second))
    ]
    truth = by_hand(net, x)
    for handle in handles:
        handle.remove()
    _, rec = th.run(net, x, capture=["first", "second"], port="input", transform={"second": mean})
    assert torch.equal(rec["first:input"], inputs["first"])
    assert torch.equal(rec["second:input"], inputs["second"].detach().mean(-1))
    _, rec = th.run(net, x, capture=["second", "second:input"], transform={"second:input": mean})
    assert torch.equal(rec["second:input"], inputs["second"].detach().mean(-1))
    assert torch.equal(rec["second"], truth["second"])


def test_gradients_operations_and_parameters_have_transforms_of_their_own(net: Net, x: Tensor) -> None:
    net(x).sum().backward()
    weight, bias = net.first.weight.grad, net.first.bias.grad
    assert weight is not None
    assert bias is not None
    net.zero_grad()
    with th.capture(
        net,
        "first.weight:grad",
        "first.bias:grad",
        "(model)/sub",
        transform={"first.weight:grad": narrow, "(model)/sub": mean},
    ) as rec:
        net(x).sum().backward()
    assert torch.equal(rec["first.weight:grad"], weight[:, :2])
    assert torch.equal(rec["first.bias:grad"], bias)
    assert torch.equal(rec["(model)/sub"], (by_hand(net, x)["second"] - 1).mean(-1))


def test_calls_of_one_site_may_have_different_transforms(net: Net, x: Tensor) -> None:
    first, second = by_hand(net, x)["relu"]
    _, rec = th.run(net, x, capture=["relu#0", "relu#1"], transform={"relu#0": narrow, "relu#1": mean})
    assert torch.equal(rec["relu#0"], first[..., :2])
    assert torch.equal(rec["relu#1"], second.mean(-1))
    _, rec = th.run(net, x, capture=["relu#1:", "relu#:1"], transform={"relu#1:": mean})
    assert torch.equal(rec["relu#0"], first)
    assert torch.equal(rec["relu#1"], second.mean(-1))
    _, rec = th.run(net, x, capture=["relu#0", "relu#1", "first"], transform={"relu": mean})
    assert [value.dim() for value in rec.values()] == [3, 2, 2]


@pytest.mark.parametrize("calls", [("relu", "relu#0"), ("relu#0", "relu#-1"), ("relu#:2", "relu#1:")])
def test_one_call_cannot_have_two_transforms(net: Net, x: Tensor, calls: tuple[str, str]) -> None:
    key = re.escape(calls[1])
    with pytest.raises(SelectorError, match=f"'{calls[0]}' and '{key}' may be the same call, which is kept once"):
        th.capture(net, *calls, transform={calls[1]: mean})


def test_sites_stay_in_the_order_in_which_they_ran(net: Net, x: Tensor) -> None:
    """Also those of one module, whose order is the one that they were written in."""
    sites = ["lstm:output.1.0", "lstm", "lstm:output.0", "first"]
    without = ["first", "lstm:output.1.0", "lstm", "lstm:output.0"]
    keys: Any = {"lstm:output.1.0": mean, "lstm:output.0": mean, "first": narrow}
    _, rec = th.run(net, x, capture=sites)
    assert rec.keys() == without
    _, rec = th.run(net, x, capture=sites, transform=keys)
    assert rec.keys() == without


def test_a_session_with_a_mapping_opens_again(net: Net, x: Tensor) -> None:
    session = th.capture(net, "first", "second", transform={"first": narrow}, max_records=1)
    for shift in range(4):
        truth = by_hand(net, x + shift)
        with session as rec:
            net(x + shift)
        assert torch.equal(rec["first"], truth["first"][..., :2])
        assert torch.equal(rec["second"], truth["second"])


def test_the_ways_to_keep_values_hold_for_each_site(net: Net, x: Tensor) -> None:
    truth = by_hand(net, x)
    with th.capture(
        net,
        "first",
        "second",
        transform={"first": narrow},
        dtype=torch.float64,
        edit={"second": th.edits.zero()},
        before_edits=True,
    ) as rec:
        net(x)
    assert torch.equal(rec["first"], truth["first"][..., :2].double())
    assert torch.equal(rec["second"], truth["second"].double())
    with th.capture(net, "first", "second", transform={"first": narrow}, keep="live") as rec:
        net(x)
    (grad,) = torch.autograd.grad(rec["first"].sum(), net.first.bias)
    assert grad.tolist() == [10.0, 10.0, 0.0, 0.0]


def test_transforms_know_the_padding_and_the_heads_of_their_own_site() -> None:
    model, _ = small_gpt2()
    tokens, mask = ids(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        states = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    keys = {"@resid_post.0": transforms.pool(), "@q.1": transforms.only(heads=1)}
    with torch.no_grad(), th.capture(model, "@resid_post.0", "@resid_post.1", "@q.1", "@k.1", transform=keys) as rec:
        model(tokens, attention_mask=mask)
    assert torch.allclose(rec["@resid_post.0"][0], states[1][0].mean(0), atol=1e-6)
    assert torch.allclose(rec["@resid_post.0"][1], states[1][1, :2].mean(0), atol=1e-6)
    assert torch.equal(rec["@resid_post.1"], states[2])
    assert rec["@k.1"].shape == (2, 4, 6, 8)
    assert rec["@q.1"].shape == (2, 1, 6, 8)


def test_keys_that_mean_nothing_or_the_same_are_refused(net: Net) -> None:
    with pytest.raises(SelectorError, match=r"transform\['head'\]: no such site is kept. There are: 'first', 'second'"):
        th.capture(net, "first", "second", transform={"head": mean})
    with pytest.raises(SelectorError, match=r"transform\['frist'\]: no such site is kept. Closest: 'first'"):
        th.capture(net, "first", "second", transform={"frist": mean})
    with pytest.raises(SelectorError, match=r"transform\['relu'\]: no such site is kept"):
        th.run(net, capture="first", transform={"relu": mean})
    with pytest.raises(SelectorError, match=r"'\*' and <class '.*Linear'> all mean 'first'. Leave one, or add"):
        th.capture(net, "first", transform={"*": mean, nn.Linear: narrow})
    with pytest.raises(TypeError, match=r"transform\['first'\] must be callable, found str"):
        th.capture(net, "first", transform={"first": "mean"})
