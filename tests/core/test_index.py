"""The names of a model: exact ones are found without a walk, and mean what a walk would say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchhook as th
from tests.models import small_gpt2
from torchhook._core import index as index_module
from torchhook._core.index import Index, all_modules


class Holder(nn.Module):
    """One module under two names, one that contains itself, a buffer, and a name with marks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = self.one
        self.add_module("a:b#1", nn.ReLU())
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("nothing", None)
        self._modules["itself"] = self


@pytest.mark.parametrize("model", [Holder(), small_gpt2()[0], nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))])
def test_an_exact_name_is_found_as_a_walk_would(model: nn.Module) -> None:
    index = Index(model)
    for path, module in Index(model).modules.items():
        assert index.find(path) is module
    for path, (owner, name) in Index(model).tensors.items():
        assert index.find_tensor(path) == (owner, name)
    for path in ("nope", "one.nope", "itself", "nothing", "..", "."):
        assert index.find(path) is None
        assert index.find_tensor(path) is None
    assert "modules" not in vars(index)


def test_every_module_is_found_once_without_names() -> None:
    model = Holder()
    assert sorted(map(id, all_modules(model))) == sorted({id(module) for module in model.modules()})


def test_a_session_on_exact_names_never_walks_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), torch.ones(1, 2)

    def walk(model: nn.Module) -> None:
        raise AssertionError("a walk")

    monkeypatch.setattr(index_module, "walk", walk)
    sites = ["0", "1.0:input", "1.1:grad", "0.weight:grad", "1.1.bias", "1.0/relu", ""]
    with th.capture(model, *sites) as rec:
        model(x).sum().backward()
    assert torch.equal(rec["0"], model[0](x))
    assert len(rec) == len(sites)


def test_a_name_with_a_dot_in_it_is_found_by_the_walk() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._modules["odd.name"] = nn.ReLU()
    with th.capture(model, "odd.name") as rec:
        model(torch.ones(1, 2))
    assert rec["odd.name"].shape == (1, 2)
