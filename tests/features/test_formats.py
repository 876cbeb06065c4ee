"""Stores of earlier versions: they open, and say what they said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features import formats
from torchhook._features.api import open_features
from torchhook.errors import ExtractError


def store(out):
    extract(jobs.Net(), jobs.data(20), ["first", ""], out, batch_size=5, rows_per_shard=10, progress=False)
    return out / "store.json"


def first_format(manifest, word):
    """As TorchHook 0.3 wrote it: without a checksum, the sites under ``layers`` or, later, ``sites``."""
    data = json.loads(manifest.read_text())
    del data["crc32"]
    sites = data.pop("sites")
    manifest.write_text(json.dumps({**data, "version": 1, word: sites}, indent=1))


class Six(torch.utils.data.Dataset):
    """What the stores beside this file were made of."""

    def __len__(self):
        return 6

    def __getitem__(self, row):
        return torch.arange(18.0).reshape(6, 3)[row], row % 2, f"id {row}\n"


def go_on(out):
    options = {"batch_size": 2, "rows_per_shard": 4, "ids": 2, "labels": 1, "progress": False}
    return extract(nn.Sequential(nn.Identity()), Six(), ["0", "0:input"], out, **options)


@pytest.mark.parametrize("format", ["format1", "format2"])
def test_a_store_that_an_earlier_torchhook_wrote_is_read(format):
    found = open_features(Path(__file__).with_name(format))
    wanted = torch.arange(18.0).reshape(6, 3)
    assert found.keys() == ["0", "0:input"]
    for site in found:
        assert torch.equal(found[site][:], wanted)
        assert torch.equal(found[site][5], wanted[5])
    assert found.ids[:] == [f"id {i}\n" for i in range(6)]
    assert found.labels[:].tolist() == [0, 1, 0, 1, 0, 1]
    assert found.verify()


def test_a_store_of_the_second_format_is_gone_on_with_in_that_format(tmp_path):
    old = Path(__file__).with_name("format2")
    shutil.copytree(old, tmp_path / "f")
    second = tmp_path / "f" / "shards" / "s000000001.safetensors"
    second.unlink()
    (tmp_path / "f" / "index.json").unlink()
    assert go_on(tmp_path / "f").verify()
    assert second.read_bytes() == (old / "shards" / second.name).read_bytes()
    assert (tmp_path / "f" / "store.json").read_bytes() == (old / "store.json").read_bytes()


def test_the_same_rows_in_a_new_store_have_the_new_checksum(tmp_path):
    found = go_on(tmp_path / "f")
    assert json.loads((tmp_path / "f" / "store.json").read_text())["version"] == 3
    for path in sorted((tmp_path / "f" / "shards").iterdir()):
        with safe_open(path, "pt") as file:
            assert "crc32" not in file.metadata()
            assert re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", file.metadata()["xxh3"])
    assert found.verify()


@pytest.mark.parametrize("format", ["format1", "format2"])
@pytest.mark.parametrize("at", [300, 4100, -1])
def test_a_flipped_bit_in_a_shard_of_an_earlier_format_is_found(tmp_path, format, at):
    shutil.copytree(Path(__file__).with_name(format), tmp_path / "f")
    path = tmp_path / "f" / "shards" / "s000000001.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    report = open_features(tmp_path / "f", incomplete=True).verify()
    assert [problem.shard for problem in report.problems] == [1]


@pytest.mark.parametrize("word", ["layers", "sites"])
def test_stores_of_the_first_format_open(tmp_path, word):
    manifest = store(tmp_path / "f")
    wanted = open_features(tmp_path / "f")
    first_format(manifest, word)
    found = open_features(tmp_path / "f")
    assert found.manifest == wanted.manifest
    assert found.manifest.sites == ("first", "")
    assert torch.equal(found["first"][:], wanted["first"][:])
    assert torch.equal(found["(model)"][:], wanted["(model)"][:])
    assert found.verify()


def test_a_store_of_a_later_version_is_refused_by_name(tmp_path):
    manifest = store(tmp_path / "f")
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(ExtractError, match=r"torchhook-features 99, and this TorchHook knows torchhook-features 1 to"):
        open_features(tmp_path / "f")


def test_a_manifest_that_was_altered_is_refused(tmp_path):
    manifest = store(tmp_path / "f")
    manifest.write_text(manifest.read_text().replace('"rows_per_shard": 10', '"rows_per_shard": 20'))
    with pytest.raises(ExtractError, match=r"it was altered\. Take it from a backup, .* begin again with resume=False"):
        open_features(tmp_path / "f")


def test_a_seal_holds_for_what_is_said_and_not_for_how():
    seal = formats.sealed({"a": [1, 2], "b": None})
    assert formats.checked(json.loads(json.dumps(seal, indent=3, sort_keys=True))) == {"a": [1, 2], "b": None}
    with pytest.raises(ValueError, match="it was altered"):
        formats.checked({**seal, "a": [2, 1]})
    with pytest.raises(ValueError, match="it says None"):
        formats.checked({"a": [1, 2], "b": None})
