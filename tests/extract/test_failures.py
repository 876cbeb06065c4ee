"""Disks, data, models and files that fail: a clear error, nothing lost, nothing half-written readable."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess

import pytest
import torch

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features import shards
from torchhook._features.api import open_features
from torchhook._features.verify import verify
from torchhook.errors import BrokenShardError, ExtractError, IncompleteStoreError, StoreMismatchError

X, Y = jobs.data(200).tensors


def do(out, model=None, data=None, **options):
    options = {"batch_size": 8, "rows_per_shard": 16, "progress": False, **options}
    return extract(
        jobs.Net() if model is None else model,
        jobs.data(200) if data is None else data,
        ["first", "second"],
        out,
        **options,
    )


def check_whole(out):
    truth = jobs.oracle(jobs.Net(), X.split(8), "first", "second")
    features = open_features(out)
    assert len(features) == 200
    assert torch.equal(features["first"][:], truth["first"])
    assert torch.equal(features["second"][:], truth["second"])
    assert verify(out).ok


@contextlib.contextmanager
def mounted(folder, options):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_a_clear_error_and_the_run_goes_on_when_there_is_room(tmp_path, monkeypatch):
    with mounted(tmp_path / "disk", "size=128k") as disk:
        with pytest.raises(ExtractError, match=r"about .* are still to be written and .* are free"):
            do(disk / "store", data=jobs.data(5000))
        assert list(disk.iterdir()) == []
        (disk / "ballast").write_bytes(bytes(90_000))
        with pytest.raises(OSError, match="No space left") as caught:
            do(disk / "store", data=iter(X.split(8)), batch_size=None)
        assert caught.value.errno == errno.ENOSPC
        there = jobs.store_bytes(disk / "store")
        assert 0 < len(there) < 13
        assert not [name for name in os.listdir(disk / "store" / "shards") if name.startswith(".")]
        assert {p.kind for p in verify(disk / "store").problems} <= {"missing"}
        with pytest.raises(IncompleteStoreError):
            open_features(disk / "store")
        (disk / "ballast").unlink()
        do(disk / "store", data=iter(X.split(8)), batch_size=None)
        assert {k: v for k, v in jobs.store_bytes(disk / "store").items() if k in there} == there
        check_whole(disk / "store")


def test_a_read_only_folder_is_an_error_before_any_work(tmp_path):
    with mounted(tmp_path / "disk", "ro,size=1m") as disk:
        with pytest.raises(OSError, match="Read-only file system"):
            do(disk / "store")


def test_an_error_of_a_writer_surfaces_and_other_shards_are_kept(tmp_path, monkeypatch):
    real = shards.encode

    def fail(tensors, metadata, *version):
        if metadata["shard"] == "4":
            raise OSError(errno.EIO, "Input/output error")
        return real(tensors, metadata, *version)

    monkeypatch.setattr(shards, "encode", fail)
    with pytest.raises(OSError, match="Input/output error"):
        do(tmp_path)
    assert "s000000003.safetensors" in jobs.store_bytes(tmp_path)
    assert "s000000004.safetensors" not in jobs.store_bytes(tmp_path)
    monkeypatch.undo()
    do(tmp_path)
    check_whole(tmp_path)


# -- values that are not numbers ------------------------------------------------------------------


def test_a_nan_is_an_error_that_names_the_layer_and_the_rows(tmp_path):
    x = X.clone()
    x[[37, 41]] = float("nan")
    with pytest.raises(
        ExtractError, match=r"'first': NaN in 2 rows \(37, 41\).*not written.*on_error='skip'.*nan='keep'"
    ):
        do(tmp_path, data=x)
    assert "s000000001.safetensors" in jobs.store_bytes(tmp_path)
    assert "s000000002.safetensors" not in jobs.store_bytes(tmp_path)
    with pytest.raises(StoreMismatchError, match="rows 26 to 38, 39 to 51 of the data are not the same"):
        do(tmp_path, data=X)
    do(tmp_path, data=X, resume=False)
    check_whole(tmp_path)


def test_nan_rows_can_be_skipped_or_kept(tmp_path):
    x = X.clone()
    x[[37, 199]] = float("nan")
    skipped = do(tmp_path / "a", data=x, on_error="skip")
    assert set(skipped.skipped) == {37, 199}
    assert "NaN in 'first'" in skipped.skipped[37]
    assert len(skipped) == 200
    assert len(skipped.dataset("first")) == 198
    truth = jobs.oracle(jobs.Net(), X.split(8), "first")["first"]
    good = [i for i in range(200) if i not in (37, 199)]
    assert torch.equal(skipped["first"][good], truth[good])
    kept = do(tmp_path / "b", data=x, nan="keep")
    assert kept.skipped == {}
    assert kept["first"][37].isnan().all()


def test_a_cast_that_overflows_is_an_error(tmp_path):
    x = X.clone()
    x[3] *= 1e5
    with pytest.raises(ExtractError, match=r"infinity after the cast to torch.float16 in 1 row \(3\).*bfloat16"):
        do(tmp_path / "a", data=x, dtype=torch.float16)
    assert do(tmp_path / "b", data=x, dtype=torch.bfloat16)["first"][3].isfinite().all()


# -- data and models that raise -------------------------------------------------------------------------


class Faulty(torch.utils.data.Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if i in self.bad:
            raise KeyError(f"row {i} is broken")
        return X[i], Y[i]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_raises_passes_its_error_on(tmp_path, workers):
    with pytest.raises(KeyError, match="row 100 is broken") as caught:
        do(tmp_path, data=Faulty({100}), workers=workers)
    if hasattr(caught.value, "__notes__"):
        assert "Committed shards are safe" in caught.value.__notes__[-1]
    assert len(jobs.store_bytes(tmp_path)) == 6
    do(tmp_path, data=Faulty(()), workers=workers)
    check_whole(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_cannot_be_loaded_are_skipped_when_asked(tmp_path, workers, capsys):
    bad = {0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 199}
    features = do(tmp_path, data=Faulty(bad), workers=workers, on_error="skip", progress=True)
    assert set(features.skipped) == bad
    assert "row 20 is broken" in features.skipped[20]
    assert "2 rows skipped in shard 1; row 20: KeyError" in capsys.readouterr().err
    good = [i for i in range(200) if i not in bad]
    truth = jobs.oracle(jobs.Net(), X.split(8), "second")["second"]
    assert torch.allclose(features["second"][good], truth[good], atol=1e-5)
    assert torch.equal(features.labels[good], Y[good])
    assert features["first"][20].isnan().all()
    assert torch.equal(features.valid(), torch.tensor(good))


class Touchy(jobs.Net):
    def forward(self, x):
        first = self.first(x)
        if bool((x[:, 0] > 100).any()):
            raise ArithmeticError("too large for me")
        return self.head(self.relu(self.second(self.relu(first))))


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_the_model_cannot_do_are_found_one_by_one(tmp_path, stream):
    x = X.clone()
    x[[50, 120], 0] = 1000
    data = {"data": iter(x.split(8)), "batch_size": None} if stream else {"data": x}
    with pytest.raises(ArithmeticError, match="too large for me"):
        do(tmp_path / "a", Touchy(), **data)
    data = {"data": iter(x.split(8)), "batch_size": None} if stream else {"data": x}
    features = do(tmp_path / "b", Touchy(), on_error="skip", **data)
    assert set(features.skipped) == {50, 120}
    good = [i for i in range(200) if i not in (50, 120)]
    truth = jobs.oracle(jobs.Net(), X.split(8), "first")["first"]
    assert torch.allclose(features["first"][good], truth[good], atol=1e-5)


# -- broken stores --------------------------------------------------------------------------------------


def test_verify_finds_every_kind_of_damage_and_says_how_to_repair_it(tmp_path):
    do(tmp_path)
    whole = jobs.store_bytes(tmp_path)
    folder = tmp_path / "shards"
    (folder / "s000000001.safetensors").unlink()
    data = bytearray(whole["s000000003.safetensors"])
    data[-5] ^= 1
    (folder / "s000000003.safetensors").write_bytes(data)
    (folder / "s000000005.safetensors").write_bytes(whole["s000000005.safetensors"][:-40])
    (folder / "s000000007.safetensors").write_bytes(whole["s000000008.safetensors"])
    report = verify(tmp_path)
    assert not report.ok
    assert {p.shard: p.kind for p in report.problems} == {1: "missing", 3: "altered", 5: "truncated", 7: "foreign"}
    assert "report.discard()" in str(report)
    assert "run the same extract call again" in str(report)
    assert report.discard() == [3, 5, 7]
    do(tmp_path)
    assert jobs.store_bytes(tmp_path) == whole
    check_whole(tmp_path)


def test_an_incomplete_store_raises_unless_asked(tmp_path):
    do(tmp_path)
    (tmp_path / "shards" / "s000000001.safetensors").unlink()
    with pytest.raises(IncompleteStoreError, match=r"lacks 1 of 13 shards \(1\).*incomplete=True"):
        open_features(tmp_path)
    features = open_features(tmp_path, incomplete=True)
    assert features.missing == [1]
    assert features["first"][40].shape == (16,)
    for key in (20, slice(0, 40), [3, 20]):
        with pytest.raises(IncompleteStoreError, match="shard 1"):
            features["first"][key]
    assert len(features.dataset("first")) == 184
    assert "incomplete" in repr(features)


def test_a_truncated_shard_is_never_read_as_data(tmp_path):
    do(tmp_path)
    whole = jobs.store_bytes(tmp_path)
    path = tmp_path / "shards" / "s000000002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    for opened in (lambda: open_features(tmp_path), lambda: do(tmp_path)):
        with pytest.raises(BrokenShardError, match=r"truncated.*To repair: .*incomplete=True\).verify\(\).discard"):
            opened()
    features = open_features(tmp_path, incomplete=True)
    assert features.missing == [2]
    assert features.verify().discard() == [2]
    do(tmp_path)
    assert jobs.store_bytes(tmp_path) == whole


def test_a_shard_altered_after_opening_is_not_trusted_for_its_size(tmp_path):
    do(tmp_path)
    features = open_features(tmp_path)
    path = tmp_path / "shards" / "s000000002.safetensors"
    path.write_bytes(b"short")
    with pytest.raises(BrokenShardError, match="truncated"):
        features["first"][40]


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no feature store"):
        open_features(tmp_path)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(ExtractError, match="not the manifest of a feature store"):
        open_features(tmp_path)
