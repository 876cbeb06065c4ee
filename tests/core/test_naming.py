"""Standard names as addresses: what they are read as, and that they go with their model."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import torchhook as th
from torchhook._core import naming
from torchhook._recording.address import Site
from torchhook.errors import SelectorError


class _Names:
    sites = {"resid_post.0": Site("0"), "z.0": Site("1", port="input"), "encoder.resid_post.0": Site("0", leaf="1")}
    refused = {"pattern.0": "it is fused."}


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    naming.remember(model, _Names())
    return model


def test_a_name_is_a_site_whose_text_is_the_name(model: nn.Module) -> None:
    (site,) = naming.sites(model, "@resid_post.0")
    assert (site, site.path, site.role, site.place) == ("@resid_post.0", "0", "@resid_post.0", "0")


def test_the_gradient_of_what_a_module_takes_is_that_of_its_input(model: nn.Module) -> None:
    (site,) = naming.sites(model, "@z.0:grad")
    assert (site, site.port) == ("@z.0:grad", "grad_input")
    with pytest.raises(SelectorError, match="grad_total"):
        naming.sites(model, "@z.0:grad_total")


def test_calls_and_globs_are_read_as_in_any_address(model: nn.Module) -> None:
    assert naming.sites(model, "@resid_post.0#2")[0].call == 2
    assert naming.sites(model, "@*.0") == ["@resid_post.0", "@z.0"]
    assert naming.sites(model, "@**.resid_post.*", "grad") == ["@resid_post.0:grad", "@encoder.resid_post.0:grad"]


@pytest.mark.parametrize("address", ["@resid_post.0:input", "@resid_post.0:output.1", "@resid_post.0/add"])
def test_a_name_has_no_parts_but_its_gradient(model: nn.Module, address: str) -> None:
    with pytest.raises(SelectorError, match="means one value"):
        naming.sites(model, address)


def test_a_glob_of_refused_names_says_why(model: nn.Module) -> None:
    with pytest.raises(SelectorError, match="it is fused"):
        naming.sites(model, "@pattern.*")


def test_names_go_with_their_model() -> None:
    model = nn.Linear(2, 2)
    naming.remember(model, _Names())
    key = id(model)
    assert key in naming._known
    del model
    gc.collect()
    assert key not in naming._known


def test_a_leaf_of_a_value_has_an_address() -> None:
    lstm = nn.LSTM(2, 3)
    with th.capture(lstm, "(model):output.1.0", "(model)") as rec:
        lstm(torch.randn(4, 2))
    assert torch.equal(rec["(model):output.1.0"], rec["(model)"][1][0])


def test_a_leaf_can_be_edited_and_a_wrong_one_lists_those_that_are_there() -> None:
    lstm = nn.LSTM(2, 3)
    with th.edit(lstm, {":output.1.0": th.edits.zero()}):
        _, (hidden, cell) = lstm(torch.randn(4, 2))
    assert not hidden.any()
    assert cell.any()
    with pytest.raises(SelectorError, match=r"'1\.1'"), th.capture(lstm, ":output.7"):
        lstm(torch.randn(4, 2))


def test_a_numbered_operation_is_that_one_in_every_call_of_its_module() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) * 2 + 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(x))

    model = Model()
    with th.capture(model, "twice/add(0)", "twice/add(1)", "twice/add") as rec:
        model(torch.zeros(1))
    assert [v.item() for v in rec.all("twice/add(0)")] == [1, 6]
    assert [v.item() for v in rec.all("twice/add(1)")] == [5, 15]
    assert [v.item() for v in rec.all("twice/add")] == [1, 5, 6, 15]
    with th.edit(model, {"twice/add(1)#0": th.edits.zero()}):
        assert model(torch.zeros(1)).item() == 5
