"""Edits in files: read back bit for bit in this process and a fresh one, and refused where they are no data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_gpt2
from torchhook import edits
from torchhook._recording import tensor_file
from torchhook._values import tree
from torchhook.errors import EditError, RecordingFileError
from torchhook.types import Site

HALF = torch.tensor([1.0, float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)


def recorded() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    return th.run(model, torch.randn(2, 3, 4))[1]


KINDS: dict[str, Any] = {
    "replace": edits.replace(torch.randn(3, 2)),
    "replace by a number": edits.replace(2.5),
    "replace by a pair": edits.replace((torch.ones(2), {"a": torch.zeros(1, dtype=torch.int8)}, None)),
    "add": edits.add(HALF),
    "add an infinity": edits.add(float("inf")),
    "scale": edits.scale(-3),
    "zero": edits.zero(),
    "mean": edits.mean((0, 1)),
    "clamp": edits.clamp(high=1.5),
    "noise": edits.noise(0.1, seed=7),
    "at": edits.at("1.0", edits.scale(2)),
    "several": [edits.add(1.0), edits.scale(2)],
    "several in several": [edits.add(1.0), [edits.scale(2), (edits.zero(), edits.noise(0.1))]],
    "patch": edits.patch(recorded()),
    "patch some": edits.patch(recorded(), positions=slice(0, 2), source="0", dim=0),
    "patch where": edits.patch(recorded(), mask=torch.tensor([True, False])),
    "only": edits.only(edits.at("0", [edits.add(torch.ones(2)), edits.zero()]), positions=[-1], rows=slice(1, None, 2)),
    "only steps": edits.only(edits.zero(), steps=[0, 2], heads=edits.along([0, 1], dim=-1, count=4)),
    "only where": edits.only(edits.patch(recorded()), positions=torch.tensor([[True, False], [False, True]])),
    "block": edits.block(slice(1, None), [0, -1], heads=2, rows=[True, False]),
    "block at a step": edits.only(edits.block(None, 0), steps=slice(1, None)),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path) -> None:
    written = {"h.3": KINDS[name], "h.*.attn:input": edits.zero()}
    path = th.save_edits(tmp_path / "edits.safetensors", written)
    read = th.load_edits(path)
    assert read == written
    assert list(read) == list(written)
    assert repr(read) == repr(written)


def bits(edit: Any) -> list[tuple[Any, ...]]:
    return [(t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).tolist()) for t in tree.tensors(vars(edit))]


def test_tensors_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    given = [
        HALF,
        torch.randn(2, 3).half(),
        torch.randn(4, 3).T.contiguous(),
        torch.tensor([1, -1]),
        torch.randn(2, 2).cfloat(),
    ]
    for tensor in (*given, torch.randn(5)[::2], torch.randn(2, requires_grad=True)):
        path = th.save_edits(tmp_path / "one.safetensors", {"fc": edits.add(tensor)})
        (again,) = th.load_edits(path).values()
        assert bits(again) == bits(edits.add(tensor.detach()))


def test_a_tensor_that_several_edits_hold_is_written_once(tmp_path: Path) -> None:
    vector = torch.randn(1000)
    path = th.save_edits(tmp_path / "e.safetensors", {f"h.{i}": edits.add(vector) for i in range(20)})
    assert path.stat().st_size < 3 * vector.nbytes
    assert all(torch.equal(edit.vector, vector) for edit in th.load_edits(path).values())


def test_the_header_can_be_read_by_others_and_by_people(tmp_path: Path) -> None:
    path = th.save_edits(tmp_path / "e.safetensors", {"h.3": edits.only(edits.add(torch.ones(8)), positions=-1)})
    with safe_open(str(path), "pt") as file:
        about = json.loads(file.metadata()["edits"])
        (name,) = file.keys()
        assert name.startswith("h.3")
        assert torch.equal(file.get_tensor(name), torch.ones(8))
    assert about["shown"] == {"h.3": "edits.only(edits.add((8,)), positions=-1)"}
    assert about["edits"][0][0] == "h.3"
    assert about["edits"][0][1]["edit"][0] == "only"
    assert b"pickle" not in path.read_bytes()


PROGRAM = """
import sys
from tests import conftest
import torch, torchhook as th
from tests.language_models import small_gpt2
model, call = small_gpt2()
with torch.no_grad(), th.edit(model, th.load_edits(sys.argv[1])):
    torch.save(model(**call).logits, sys.argv[2])
"""


def test_a_fresh_process_computes_the_same_bits(tmp_path: Path) -> None:
    model, call = small_gpt2()
    _, other = th.run(model, call["input_ids"].flip(1), capture=["transformer.h.0", "transformer.h.1.mlp"])
    change = {
        "transformer.h.0": edits.only(edits.patch(other), positions=[1, -1], rows=0),
        "transformer.h.1.mlp": [edits.noise(0.5, seed=3), edits.only(edits.add(torch.randn(32)), positions=[[0], [4]])],
        "transformer.h.1.attn.c_proj:input": edits.only(edits.mean(), heads=[1, 2]),
        "transformer.h.*.attn/scaled_dot_product_attention:input": edits.block(slice(2, None), 1, heads=0),
    }
    with torch.no_grad(), th.edit(model, change):
        expected = model(**call).logits
    path = th.save_edits(tmp_path / "edits.safetensors", change)
    result = tmp_path / "logits.pt"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), str(result)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(result), expected)


# -- what is refused --------------------------------------------------------------------------------------------------


def louder(value: Tensor, site: Site) -> Tensor:
    return value * 2


class Thing:
    pass


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (louder, "'h.3': louder holds the function louder"),
        (lambda v: v, "holds the function <lambda>"),
        (edits.only(louder, positions=0), "edits.only(louder, positions=0) holds the function louder"),
        (edits.at("0", [edits.zero(), torch.relu]), "holds the function relu"),
        ([edits.zero(), [louder]], "holds the function louder"),
        ([edits.zero(), louder], "holds the function louder"),
        (nn.ReLU(), "holds the function ReLU()"),
        (edits.replace(Thing()), "Thing in new="),
        (edits.replace([Thing()]), "Thing in new="),
        (edits.replace(louder), "function in new="),
        (3, "an object that is no edit, 3"),
    ],
)
def test_what_is_no_data_is_refused_by_name(edit: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(EditError, match=re.escape("save_edits: 'h.3'")) as caught:
        th.save_edits(tmp_path / "e.safetensors", {"h.1": edits.zero(), "h.3": edit})
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_keys_are_addresses(tmp_path: Path) -> None:
    for key in (nn.Linear, re.compile("h"), ("a", "b"), nn.Linear(1, 1)):
        with pytest.raises(EditError, match=r"which a file cannot hold. Write the address"):
            th.save_edits(tmp_path / "e.safetensors", {key: edits.zero()})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="edits are a dict of addresses and edits, found list"):
        th.save_edits(tmp_path / "e.safetensors", [edits.zero()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"found edits.zero\(\): say where, {'h.3': edits.zero\(\)}"):
        th.save_edits(tmp_path / "e.safetensors", edits.zero())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"edits are written as safetensors, and .pt is read as another"):
        th.save_edits(tmp_path / "e.pt", {"h": edits.zero()})
    read = th.load_edits(th.save_edits(tmp_path / "e.safetensors", {Site("h.3", port="input"): edits.zero()}))
    assert read == {"h.3:input": edits.zero()}


def test_broken_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = th.save_edits(tmp_path / "e.safetensors", {"h.3": edits.add(torch.randn(100))})
    data = path.read_bytes()
    broken = tmp_path / "broken.safetensors"
    for length in (0, 4, 40, len(data) // 2, len(data) - 1):
        broken.write_bytes(data[:length])
        with pytest.raises(RecordingFileError, match="cannot be read"):
            th.load_edits(broken)
    for at in np.random.default_rng(0).integers(8, len(data), 30):
        broken.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(RecordingFileError):
            th.load_edits(broken)
    saved = recorded().save(tmp_path / "r.safetensors")
    with pytest.raises(
        RecordingFileError, match=r"holds no edits: its format is 'torchhook.recording'. th.load opens it"
    ):
        th.load_edits(saved)
    with pytest.raises(RecordingFileError, match=r"is not a torchhook recording: its format is 'torchhook.edits'"):
        th.load(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"format": "torchhook.edits", "version": "2", "edits": "{}"}, "has format version 2"),
        ({"format": "torchhook.edits", "version": "x", "edits": "{}"}, "cannot be understood"),
        ({"format": "torchhook.edits", "version": "0", "edits": '{"edits": []}'}, "has format version 0"),
        ({"format": "torchhook.edits", "version": "1"}, "cannot be understood"),
        ({"format": "torchhook.edits", "version": "1", "edits": "[]"}, "cannot be understood"),
        (
            {"format": "torchhook.edits", "version": "1", "edits": '{"edits": [["h", {"edit": ["eval", {}]}]]}'},
            "unknown edit 'eval'",
        ),
        (
            {"format": "torchhook.edits", "version": "1", "edits": '{"edits": [["h", {"edit": ["scale", {}]}]]}'},
            "cannot be understood",
        ),
        ({"format": "torchhook.edits", "version": "1", "edits": '{"edits": [["h", {"leaf": 3}]]}'}, "is not an edit"),
        ({"format": "other"}, "its format is 'other'"),
    ],
)
def test_files_that_this_version_does_not_know_are_refused(metadata: dict[str, str], said: str, tmp_path: Path) -> None:
    path = tensor_file.write(tmp_path / "e.safetensors", {}, metadata)
    with pytest.raises(RecordingFileError, match=said):
        th.load_edits(path)
