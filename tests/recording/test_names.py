"""The names of the tensors in a saved recording, as other readers of safetensors find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torchhook as th
from tests.recording.round_trips import quietly
from torchhook._recording import saving
from torchhook.types import Recording, Site


def recorded(**values: list[Any]) -> Recording:
    rec = Recording("Net")
    for name, calls in values.items():
        for call, value in enumerate(calls):
            rec.opened(Site(name)).append((call, next(rec.order), value))
    return rec


def test_another_reader_finds_tensors_by_their_sites(tmp_path: Path) -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 4), act, nn.LSTM(4, 2), nn.Identity())
    model.add_module("again", nn.Identity())
    with th.capture(model, "0", "0:input", "2", "(model)", "0.weight:grad") as rec:
        output, _ = model(torch.randn(5, 3))
        output.sum().backward()
    found = load_file(rec.save(tmp_path / "run.safetensors"))
    names = {"0:input", "0", "2[0]", "2[1.0]", "2[1.1]", "0.weight:grad"}
    # The model returns what its last layers do: the same tensors, written once or again.
    assert {name for name in found if not name.startswith("(model)")} == names
    assert torch.equal(found["0"], rec["0"])
    assert torch.equal(found["2[1.0]"], rec["2"][1][0])
    assert torch.equal(found["0.weight:grad"], model[0].weight.grad)


def test_a_site_that_ran_several_times_has_its_calls_in_the_names(tmp_path: Path) -> None:
    rec = recorded(relu=[torch.ones(1), torch.zeros(2)], fc=[{"logits": torch.ones(3), "rest": [torch.ones(4), 1]}])
    found = load_file(rec.save(tmp_path / "run.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "relu#0": (1,),
        "relu#1": (2,),
        "fc[logits]": (3,),
        "fc[rest.0]": (4,),
    }


def test_names_that_are_taken_get_a_number(tmp_path: Path) -> None:
    rec = recorded(a=[torch.eye(3).to_sparse()], __metadata__=[torch.ones(2)])
    rec.opened(Site("a", port="input")).append((0, 10, torch.ones(4)))
    rec.opened(Site("a:input")).append((0, 11, torch.ones(5)))
    path = rec.save(tmp_path / "run.safetensors")
    assert {"a", "a (2)", "__metadata__ (2)", "a:input", "a:input (2)"} == set(load_file(path))
    again = th.load(path)
    assert torch.equal(again["a"].to_dense(), torch.eye(3))
    assert torch.equal(again["__metadata__"], torch.ones(2))
    assert again.records()[-1].value.shape == (5,)


def test_what_holds_itself_is_named_and_ends(tmp_path: Path) -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    assert set(load_file(recorded(a=[loop]).save(tmp_path / "run.safetensors"))) == {"a[0]"}


def test_a_tensor_that_is_held_twice_is_written_once_under_its_first_name(tmp_path: Path) -> None:
    shared = torch.ones(3)
    path = recorded(a=[shared], b=[(shared, shared)]).save(tmp_path / "run.safetensors")
    assert set(load_file(path)) == {"a"}
    assert torch.equal(th.load(path)["b"][1], shared)


def test_files_that_number_their_tensors_still_load() -> None:
    old = Path(__file__).with_name("version1.safetensors")
    stored = load_file(old)
    assert {f"t{number}" for number in range(len(stored))} == set(stored)
    found = [record.value for record in quietly(lambda: th.load(old)).records()]
    assert any(isinstance(value, Tensor) and torch.equal(value, stored["t0"]) for value in found)


@pytest.mark.parametrize("name", ["run.pt", "run.PTH", "run.npz", "run.pkl", "run.json"])
def test_the_ending_of_another_format_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: a recording is written as safetensors.* as 'run.safetensors'"):
        recorded(a=[torch.ones(2)]).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    for fine in ("run", "run.safetensors", "run.v2", "resnet18.layer4"):
        assert saving.named(tmp_path / fine).name == fine
