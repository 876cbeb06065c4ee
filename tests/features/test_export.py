"""Exported files: whole or not at all, and the same text again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._features import columns
from torchhook._features.api import open_features

IDENTITY = nn.Sequential(nn.Identity())
X = torch.arange(60.0).reshape(20, 3)


def store(out, ids=None, **options):
    return extract(IDENTITY, X, "0", out, ids=ids, batch_size=5, rows_per_shard=5, progress=False, **options)


STRANGE = ["two\nlines", "", "\r", "a\u2028b", "\x00", "trailing ", "日本"]


def test_ids_may_be_any_text(tmp_path):
    ids = [STRANGE[i % len(STRANGE)] + str(i) for i in range(20)]
    features = store(tmp_path / "f", ids)
    for access in ("mmap", "read"):
        found = open_features(tmp_path / "f", access=access).ids
        assert found[:] == ids
        assert [found[i] for i in range(20)] == ids
    assert features.verify()
    written = features.export(tmp_path / "npy")
    assert [os.path.basename(path) for path in written] == ["0.npy", "ids.json"]
    assert json.loads((tmp_path / "npy/ids.json").read_text()) == ids


@pytest.mark.parametrize("ends", ["\n", "\r", "\x0b", "\x1c", "\x85", "\u2029"])
def test_text_is_lines_where_lines_can_hold_it(tmp_path, ends):
    plain = [f"row {i} é\t" if i else "" for i in range(20)]
    store(tmp_path / "a", plain).export(tmp_path / "npy")
    assert (tmp_path / "npy/ids.txt").read_bytes().decode().split("\n") == [*plain, ""]
    store(tmp_path / "b", [*plain[:-1], f"x{ends}"]).export(tmp_path / "other")
    assert json.loads((tmp_path / "other/ids.json").read_bytes())[-1] == f"x{ends}"
    assert not (tmp_path / "other/ids.txt").exists()


def test_what_is_no_unicode_is_kept_escaped(tmp_path):
    ids = [os.fsdecode(b"caf\xe9.png") if i % 2 else "\ud800 alone" for i in range(20)]
    features = store(tmp_path / "f", ids)
    assert features.ids[:2] == ["\\ud800 alone", "caf\\xe9.png"]
    assert features.verify()
    features.export(tmp_path / "npy")
    assert (tmp_path / "npy/ids.txt").read_bytes().decode().split("\n")[:2] == features.ids[:2]


def test_an_export_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    features = store(tmp_path / "f", transform=lambda v: transforms.Rows(row[:2] for row in v))
    features.export(tmp_path / "npy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "npy").iterdir()}
    assert sorted(before) == ["0.npy", "0.offsets.npy"]
    blocks = columns.Column.blocks

    def breaks_off(self):
        for number, block in enumerate(blocks(self)):
            if number == 2:
                raise KeyboardInterrupt
            yield block

    whole = np.cumsum  # the offsets are known before the rows are read again

    def then_break(*arguments):
        monkeypatch.setattr(columns.Column, "blocks", breaks_off)
        return whole(*arguments)

    monkeypatch.setattr("torchhook._features.export.np.cumsum", then_break)
    with pytest.raises(KeyboardInterrupt):
        features.export(tmp_path / "npy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "npy").iterdir()} == before


def test_every_file_is_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    features = store(tmp_path / "f", [str(i) for i in range(20)])
    synced, named = set(), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino) or fsync(handle))

    def watched(source, target):
        named.append((os.path.basename(target), os.stat(source).st_ino in synced))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    features.export(tmp_path / "npy")
    assert named == [("0.npy", True), ("ids.txt", True)]
    assert (tmp_path / "npy").stat().st_ino in synced


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    store(tmp_path / "f")
    code = (
        "import resource, signal, sys; from torchhook._features.api import open_features; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); features = open_features(sys.argv[1]); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); features.export(sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "f"), str(tmp_path / "npy")], capture_output=True, text=True
    )
    assert "OSError" in done.stderr
    assert list((tmp_path / "npy").iterdir()) == []


def test_an_empty_column_and_rows_without_values_are_exported(tmp_path):
    features = extract(
        IDENTITY, torch.empty(6, 0, 3), "0", tmp_path / "f", batch_size=3, rows_per_shard=3, progress=False
    )
    features.export(tmp_path / "npy")
    assert np.load(tmp_path / "npy/0.npy").shape == (6, 0, 3)
    assert features["0"][[1, 5]].shape == (2, 0, 3)
