"""Nothing is lost, mixed up or accepted by accident."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.models import Merges
from torchhook._extract import progress as progress_module
from torchhook._extract.api import extract
from torchhook._extract.fingerprint import of_model
from torchhook._extract.function_fingerprint import of_function
from torchhook._features import direct_io as disk_module
from torchhook._features import storage
from torchhook.errors import ExtractError, SelectorError, StoreMismatchError

E = functools.partial(extract, progress=False)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def lin(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def same():
    return nn.Sequential(nn.Identity())


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- beginning again --------------------------------------------------------------------------------


def test_a_call_that_fails_before_it_writes_leaves_the_old_store(tmp_path, monkeypatch):
    E(lin(), X, "0", tmp_path / "o", rows_per_shard=10)
    there = files(tmp_path)
    again = functools.partial(E, lin(), out=tmp_path / "o", resume=False)
    calls = [
        (SelectorError, lambda: again(data=X, sites="typo")),
        (RuntimeError, lambda: again(data=torch.ones(3, 7), sites="0")),
        (ExtractError, lambda: again(data=X[:0], sites="0")),
        (ValueError, lambda: again(data=X, sites="0", engine_options={"actors": 2})),
        (ExtractError, lambda: again(data=X, sites="0", engine="torchrun")),
        (TypeError, lambda: again(data=3, sites="0")),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
        assert files(tmp_path) == there
    again(data=X, sites="0", dry_run=True)
    assert files(tmp_path) == there


def test_a_store_to_be_replaced_counts_as_free_and_its_shards_as_to_do(tmp_path, monkeypatch):
    E(lin(), X, "0", tmp_path, rows_per_shard=10)
    there = files(tmp_path)
    assert E(lin(), X, "0", tmp_path, rows_per_shard=10, dry_run=True).todo == 0
    assert E(lin(), X, "0", tmp_path, rows_per_shard=10, dry_run=True, resume=False).todo == 4
    monkeypatch.setattr(storage.Folder, "free", lambda self: 100)
    big = torch.randn(10_000, 3)
    with pytest.raises(ExtractError, match="still to be written"):
        E(lin(), big, "0", tmp_path, resume=False)
    assert files(tmp_path) == there
    features = E(lin(1), X, ["0", "2"], tmp_path, resume=False, rows_per_shard=20)
    assert torch.equal(features["2"][:], lin(1)(X).detach())


# -- other models, other functions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.MaxPool2d(2), nn.MaxPool2d(3)),
    ],
)
def test_modules_without_numbers_are_told_apart(one, other):
    assert of_model(one) != of_model(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_numbers_in_other_places_are_another_model(dtype):
    holder = nn.Module()
    holder.register_buffer("table", torch.arange(300_003 * 3).reshape(-1, 3).to(dtype))
    known = of_model(holder)
    for i, j in ((0, 1), (5, 300_000), (131_072, 262_145)):
        table = holder.table.clone()
        holder.table[[i, j]] = holder.table[[j, i]]
        assert (of_model(holder) == known) == torch.equal(holder.table, table)
        holder.table[[i, j]] = holder.table[[j, i]]
        assert of_model(holder) == known


def test_another_input_function_or_length_is_another_run(tmp_path):
    E(same(), X, "0", tmp_path, input_fn=lambda b: b * 2, rows_per_shard=10)
    (tmp_path / "shards" / "s000000001.safetensors").unlink()
    with pytest.raises(StoreMismatchError, match="input_fn: not the same, <lambda> in both"):
        E(same(), X, "0", tmp_path, input_fn=lambda b: b * 3, rows_per_shard=10)
    assert torch.equal(E(same(), X, "0", tmp_path, input_fn=lambda b: b * 2, rows_per_shard=10)["0"][:], X * 2)
    tokens = torch.randn(6, 5, 2)
    E(same(), tokens, "0", tmp_path / "t", lengths=lambda b: [2] * len(b))
    with pytest.raises(StoreMismatchError, match="lengths: "):
        E(same(), tokens, "0", tmp_path / "t", lengths=lambda b: [3] * len(b))


def test_functions_of_objects_that_hold_themselves_and_of_sets_are_known_again():
    class Loop:
        def __init__(self):
            self.me = self

        def take(self, batch):
            return batch

    assert of_function(Loop().take) == of_function(Loop().take)
    code = (
        "from torchhook._extract.function_fingerprint import of_function\n"
        "print(of_function(lambda b: b in {'a', 'b', 'c', 'd'}), of_function({'x', 'y', 'z'}))"
    )
    told = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        .stdout.decode()
        .split(" ", 1)[1]
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1


# -- numbers that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_a_cast_that_saturates_is_an_error_too(tmp_path, dtype):
    x = torch.tensor([[1.0], [448.0], [-460.0], [1e6], [2.0]])
    with pytest.raises(ExtractError, match=rf"infinity after the cast to {dtype} in 1 row \(3\)"):
        E(same(), x, "0", tmp_path / "a", dtype=dtype)
    features = E(same(), x, "0", tmp_path / "b", dtype=dtype, on_error="skip")
    assert set(features.skipped) == {3}
    good = [0, 1, 2, 4]
    assert torch.equal(features["0"][good].float(), x[good].to(dtype).float())


def test_a_label_may_be_no_number(tmp_path):
    y = torch.arange(40.0)
    y[7] = float("nan")
    data = torch.utils.data.TensorDataset(X, y)
    for on_error in ("raise", "skip"):
        features = E(same(), data, "0", tmp_path / on_error, on_error=on_error)
        assert features.skipped == {}
        assert torch.equal(features.labels[:].isnan(), y.isnan())


# -- disks and bars -----------------------------------------------------------------------------------------


def test_without_a_bar_there_is_no_tqdm(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "tqdm", None)
    x = X.clone()
    x[5] = float("nan")
    assert set(E(same(), x, "0", tmp_path, on_error="skip").skipped) == {5}
    assert "1 row skipped in shard 0" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_store_is_not_written_to(tmp_path, monkeypatch, stream):
    def call():
        return E(same(), iter(X.split(10)) if stream else X, "0", tmp_path, rows_per_shard=10)

    call()

    @contextlib.contextmanager
    def refuse(self, final, chunks):
        raise OSError(errno.EROFS, "Read-only file system")
        yield

    monkeypatch.setattr(storage.Folder, "_written", refuse)
    assert torch.equal(call()["0"][:], X)


def test_an_error_of_the_disk_names_the_file_and_says_what_is_safe(tmp_path, monkeypatch):
    real = disk_module.write

    def full(handle, chunks):
        if sum(map(len, chunks)) > 4000 and len(list((tmp_path / "shards").glob("s*"))) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, chunks)

    monkeypatch.setattr(disk_module, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*s00000000\d.safetensors'") as caught:
        E(same(), X, "0", tmp_path, rows_per_shard=5)
    if hasattr(caught.value, "__notes__"):
        assert sum("Committed shards are safe" in note for note in caught.value.__notes__) == 1


def test_a_models_own_train_method_is_not_called(tmp_path):
    model = nn.Sequential(Merges(3, 4), nn.Dropout(0.5))
    expected = nn.functional.linear(X, model[0].weight, model[0].bias).detach()
    weight = model[0].weight.detach().clone()
    torch.testing.assert_close(E(model, X, "1", tmp_path)["1"][:], expected)
    assert torch.equal(model[0].weight, weight)
    assert model[0].training


# -- where a store may be ---------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_file_where_the_store_should_be_is_told_and_stays(tmp_path, below):
    (tmp_path / "script.py").write_text("mine")
    out = tmp_path / "script.py" / below
    with pytest.raises(ExtractError, match=r"^out='.*': .*script\.py is a file\. Give the path of a folder"):
        E(lin(), X, "0", out)
    with pytest.raises(ExtractError, match=r"script\.py is a file"):
        E(lin(), X, "0", f"file://{out}", dry_run=True)
    assert (tmp_path / "script.py").read_text() == "mine"


def test_other_files_in_the_folder_of_a_store_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert len(E(lin(), X, "0", tmp_path)) == 40
    assert len(E(lin(), X, "0", tmp_path, resume=False)) == 40
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_store_is_made_where_hidden_files_and_the_rest_of_another_are(tmp_path):
    E(lin(), X, "0", tmp_path, rows_per_shard=10)
    (tmp_path / "store.json").unlink()
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "index.0123.json").write_text("")
    assert len(E(lin(), X, "0", tmp_path, resume=False)) == 40
