"""``torchhook diff`` of all that a file can hold, against what ``nets`` computes with bare torch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cli import nets
from tests.cli.conftest import Command

SMALL, OTHER = "tests.cli.nets:small", "tests.cli.nets:other"


@pytest.fixture
def x(tmp_path: Path) -> torch.Tensor:
    made = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    np.save(tmp_path / "x.npy", made.numpy())
    return made


@pytest.fixture
def values(x: torch.Tensor) -> dict[str, torch.Tensor]:
    model = nets.small().eval()
    with torch.no_grad():
        return {"0": model[0](x), "3": model[:4](x), "4": model(x)}


def kept(values: dict[str, torch.Tensor], path: Path) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in values.items()})
    elif path.suffix == ".npy":
        np.save(path, values["4"].numpy())
    else:
        save_file({name: tensor.contiguous() for name, tensor in values.items()}, path)
    return path


@pytest.mark.parametrize("kind", [".npz", ".safetensors", ".npy"])
def test_a_model_is_compared_with_arrays_on_either_side(
    torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor], kind: str
) -> None:
    file, given = kept(values, tmp_path / f"values{kind}"), ("--input", tmp_path / "x.npy")
    for sides in ((SMALL, file), (file, SMALL)):
        assert torchhook("diff", *sides, *given).code == 0
    for sides in ((OTHER, file), (file, OTHER)):
        done = torchhook("diff", *sides, *given, "--json")
        found: dict[str, Any] = json.loads(done.out)
        assert (done.code, found["first"]) == (1, "" if kind == ".npy" else "4")
        assert len(found["rows"]) == (1 if kind == ".npy" else 3)


def test_arrays_are_compared_with_arrays(torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    one = kept(values, tmp_path / "a.npz")
    same, other = kept(values, tmp_path / "b.safetensors"), kept(values | {"3": values["3"] + 1}, tmp_path / "c.npz")
    assert torchhook("diff", one, same).code == 0
    assert torchhook("diff", one, other).code == 1
    assert torchhook("diff", one, other, "-s", "4").code == 0
    recorded = tmp_path / "recorded.safetensors"
    torchhook("run", SMALL, "--input", tmp_path / "x.npy", "-s", "4", "-s", "(model)", "-o", recorded)
    assert torchhook("diff", recorded, one, "-s", "4").code == 0


def test_layers_are_chosen_whichever_side_runs(
    torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    file, given = kept(values, tmp_path / "values.npz"), ("--input", tmp_path / "x.npy")
    for sides in ((OTHER, file), (file, OTHER)):
        assert torchhook("diff", *sides, *given, "-s", "0", "-s", "3").code == 0
        assert torchhook("diff", *sides, *given, "-s", "4").code == 1


def test_names_lead_from_one_side_to_the_other(
    torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    file = kept({"/conv/Conv_output_0": values["0"], "head": values["4"]}, tmp_path / "onnx.npz")
    given = ("--input", tmp_path / "x.npy")
    done = torchhook("diff", SMALL, file, *given)
    assert done.code == 2
    assert "Say with --name A=B what is what" in done.err
    done = torchhook("diff", SMALL, file, *given, "--name", "0=/conv/Conv_output_0", "--name", "4=head", "--json")
    assert done.code == 0
    assert [(row["site"], row["status"]) for row in json.loads(done.out)["rows"]] == [("0", "same"), ("4", "same")]
    assert "--name head: give A=B" in torchhook("diff", SMALL, file, *given, "--name", "head").err


def test_a_program_is_a_side(torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    # By its own default, torch 2.6 exports with strict=True, and cannot make layers of such a program again.
    program = torch.export.export(nets.small().eval(), (torch.randn(2, 3, 8, 8),), strict=False)
    torch.export.save(program, tmp_path / "small.pt2")
    file, given = kept(values, tmp_path / "values.npz"), ("--input", tmp_path / "x.npy", "--allow-pickle")
    assert torchhook("diff", SMALL, tmp_path / "small.pt2", *given).code == 0
    assert torchhook("diff", tmp_path / "small.pt2", file, *given).code == 0
    assert torchhook("diff", OTHER, tmp_path / "small.pt2", *given, "--local").code == 1
    assert "--allow-pickle if you trust it" in torchhook("diff", tmp_path / "small.pt2", file, *given[:2]).err


def test_what_cannot_be_compared_is_told_in_one_line(
    torchhook: Command, tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    file, given = kept(values, tmp_path / "values.npz"), ("--input", tmp_path / "x.npy")
    (tmp_path / "damaged.npz").write_bytes(b"no archive")
    (tmp_path / "damaged.npy").write_bytes(b"no array")
    (tmp_path / "weights.pth").write_bytes(b"")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with (tmp_path / "pickled.npy").open("wb") as out:
        pickle.dump({}, out)
    cases = [
        ((SMALL, file), "give one input"),
        ((SMALL, tmp_path / "absent.npz", *given), "no file"),
        ((SMALL, tmp_path / "damaged.npz", *given), "is no npz file"),
        ((SMALL, tmp_path / "damaged.npy", *given), "is no npy file that can be read without pickle"),
        ((SMALL, tmp_path / "objects.npy", *given), "is no npy file that can be read without pickle"),
        ((SMALL, tmp_path / "pickled.npy", *given), "is no npy file that can be read without pickle"),
        ((SMALL, tmp_path / "weights.pth", *given), "is no file that diff reads"),
        ((SMALL, file, *given, "--local"), "a file of values is compared as it is, without a run: leave out --local"),
        ((SMALL, file, *given, "--weights-b", file), "leave out --weights-b"),
        ((file, SMALL, *given, "--weights", file), "leave out --weights."),
        ((file, file, *given), "two files of values are compared as they are, without a run: leave out --input"),
        ((file, file, "-s", "7"), "--sites 7 matches nothing"),
    ]
    for arguments, sentence in cases:
        done = torchhook("diff", *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert sentence in done.err
        assert len(done.err.strip().splitlines()) == 1
