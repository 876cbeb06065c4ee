"""The names of a model: exact ones are found without a walk, and mean what a walk would say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_gpt2
from torchhook._core import index as index_module
from torchhook._core.index import Index, all_modules, glob_pattern


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


# -- globs ------------------------------------------------------------------------------------


def nested() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"attn": nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)}), "mlp": nn.ReLU()})

    model = nn.Module()
    model.h = nn.ModuleList([block() for _ in range(3)])
    model.norm = nn.BatchNorm1d(2)
    model.register_buffer("steps", torch.zeros(1))
    model.again = model.h[1]  # shared
    return model


PATTERNS = [
    "*",
    "h.*",
    "h.*.attn",
    "h.[02].attn.?",
    "*.1.mlp",
    "**",
    "**.q",
    "h.**",
    "h.**.k",
    "**.attn.*",
    "nothing.*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_glob_finds_what_a_walk_through_all_names_would(pattern: str) -> None:
    index = Index(nested())
    matches = glob_pattern(pattern).fullmatch
    every = [(path, module) for path, module in index.modules.items() if path and matches(path + ".")]
    assert list(Index(index.root).matching(pattern)) == every


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, "steps", "norm.*", "**.weight", "h.*.attn.q.weight", "**.steps", "norm.running_*"]
)
def test_tensors_are_found_as_a_walk_through_all_of_them_would(pattern: str) -> None:
    index = Index(nested())
    matches = glob_pattern(pattern).fullmatch
    every = [(path, *found) for path, found in index.tensors.items() if matches(path + ".")]
    assert list(Index(index.root).matching_tensors(pattern)) == every


def test_a_glob_looks_only_where_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(nested())
    monkeypatch.setattr(Index, "modules", property(lambda self: pytest.fail("a walk")))
    assert [path for path, _ in index.matching("h.*.mlp")] == ["h.0.mlp", "h.1.mlp", "h.2.mlp"]


@pytest.mark.parametrize("way", ["find", "glob", "walk"])
def test_whether_what_was_found_is_still_there(way: str) -> None:
    model = nested()
    index = Index(model)
    found = {
        "find": lambda: index.find("h.1.attn.q", index.followed),
        "glob": lambda: list(index.matching("h.*.attn.q")),
        "walk": lambda: index.modules,
    }
    found[way]()
    assert index.is_as_it_was()
    model.h[1]["attn"]["q"] = nn.Linear(2, 2)
    assert not index.is_as_it_was()


def test_plain_tensors_that_a_model_owns_are_known_by_id() -> None:
    model = nested()
    owned = {id(t) for t in Index(model).owned() if type(t) is Tensor}
    assert Index(model).plain_ids() == owned
    assert len(owned) == 4  # steps, and the three of the norm
    model.h[0].again = model  # a model that contains itself
    assert Index(model).plain_ids() == owned
