"""Flipped bits in what is read before any row: the store's own error or the right values, and nothing else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.extract import jobs
from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._features import shards
from torchhook._features.api import open_features
from torchhook.errors import BrokenShardError, ExtractError, MissingRecordError

ROWS = 6


class Fails(jobs.Net):
    """Rows of different lengths, and a row that is skipped."""

    def forward(self, x):
        if (x[:, 0] > 1e6).any():
            raise ValueError("too large")
        return super().forward(x)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("damage") / "f"
    x, y = jobs.data(ROWS).tensors
    x[4, 0] = 1e9
    extract(
        Fails(), torch.utils.data.TensorDataset(x, y), ["first", "second"], out, batch_size=1, rows_per_shard=3,
        ids=[f"row {i}\n" for i in range(ROWS)], transform={"second": lambda v: transforms.Rows(r[:5] for r in v)},
        on_error="skip", progress=False,
    )  # fmt: skip
    return out


def contents(path: Path, access: str) -> list[str]:
    """All that a reader can be told, as text: NaN is not equal to itself."""
    features = open_features(path, access=access)
    names = ["first", "second"] if "first" in features else ["0", "0:input"]
    columns = [features[name][:] for name in names]
    return [repr(part) for part in (*columns, features.ids[:], features.labels[:], features.skipped, features.valid())]


def flips(file: Path, end: int, seed: int):
    """A bit of every third byte, by chance; the eight length bytes all."""
    good, chance = file.read_bytes(), random.Random(seed)
    for at in (*range(8), *range(8 + seed % 3, end, 3)):
        altered = bytearray(good)
        altered[at] ^= 1 << chance.randrange(8)
        yield at, bytes(altered)


def check(path: Path, name: str, end: int | None, seed: int, access: str) -> float:
    """The part of flips that is refused; all others must change nothing."""
    wanted = contents(path, access)
    file = path / name
    refused = tried = 0
    for at, altered in flips(file, file.stat().st_size if end is None else end, seed):
        tried += 1
        file.write_bytes(altered)
        try:
            assert contents(path, access) == wanted, at
        except (ExtractError, MissingRecordError):
            refused += 1
    return refused / tried


def header_end(path: Path) -> int:
    """Where the text of a header ends: what follows are blanks."""
    data = path.read_bytes()
    return len(data[: 8 + int.from_bytes(data[:8], "little")].rstrip(b" ")) + 20


@pytest.mark.parametrize(("access", "indexed"), [("mmap", False), ("read", True)])
def test_flipped_bits_of_a_header_are_found(whole, tmp_path, access, indexed):
    path = shutil.copytree(whole, tmp_path / "f")
    if not indexed:
        (path / "index.json").unlink()
    name = shards.name_of(1)
    end = header_end(path / name)
    # The header has a checksum of its own. Not every one: the checksum of the rows is not looked at by a reader.
    assert check(path, name, end, 1, access) > 0.95


@pytest.mark.parametrize("name", ["store.json", "index.json"])
def test_flipped_bits_of_the_other_files_are_found(whole, tmp_path, name):
    path = shutil.copytree(whole, tmp_path / "f")
    # A damaged index is made again from the headers; a damaged manifest is refused.
    assert check(path, name, None, 2, "mmap") == (0 if name == "index.json" else 1)


@pytest.mark.parametrize("name", [shards.name_of(0), "store.json", "index.json"])
def test_flipped_bits_in_a_store_of_the_first_format_give_no_other_rows(tmp_path, name):
    path = shutil.copytree(Path(__file__).with_name("format1"), tmp_path / "f")
    if name != "index.json":
        (path / "index.json").unlink()
    end = header_end(path / name) if name.startswith("shards") else None
    check(path, name, end, 3, "mmap")


def test_verify_finds_every_flipped_bit_of_a_header(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "f")
    file = path / shards.name_of(0)
    end = header_end(file) - 20
    for at, altered in flips(file, end, 4):
        file.write_bytes(altered)
        report = open_features(path, incomplete=True).verify()
        assert [problem.shard for problem in report.problems] == [0], at


def test_damage_since_the_store_was_opened_is_found(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "f")
    file = path / shards.name_of(1)
    good = file.read_bytes()
    for access in ("mmap", "read"):
        for kept in (len(good) - 1, 4096, 100, 0):
            file.write_bytes(good)
            features = open_features(path, access=access)
            file.write_bytes(good[:kept])
            with pytest.raises(BrokenShardError, match=r"s000000001\.safetensors"):
                [features[name][:] for name in ("first", "second")], features.ids[:], features.labels[:]
            assert torch.isfinite(features["first"][:3]).all()  # the other shard is as it was
        file.write_bytes(good)
        features = open_features(path, access=access)
        file.unlink()
        with pytest.raises(ExtractError, match="is gone since the store was opened"):
            features.ids[5]
