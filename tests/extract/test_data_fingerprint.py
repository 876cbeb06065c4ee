"""Data has a fingerprint: other rows, files, ids or preparation are refused, and the difference is named."""

from __future__ import annotations

import functools
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from torchhook._extract import sources
from torchhook._extract.api import ImageFolder, extract
from torchhook._extract.data_fingerprint import of_data
from torchhook.errors import DataWarning, StoreMismatchError

E = functools.partial(extract, progress=False, rows_per_shard=10, batch_size=5)
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))


def same():
    return nn.Sequential(nn.Identity())


def flat():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def altered(x=X, row=23):
    other = x.clone()
    other[row, 1] += 1e-3
    return other


class Map(Dataset):
    """Map-style data of which nothing but its rows is known."""

    def __init__(self, rows):
        self.rows = rows
        self.read = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.read.append(i)
        return self.rows[i]


# -- rows in memory and map-style data ------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 23, 59])
@pytest.mark.parametrize(
    "held",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: TensorDataset(x),
        lambda x: TensorDataset(x, torch.arange(len(x))),
        lambda x: list(x),
        lambda x: [{"x": row} for row in x],
        lambda x: Subset(TensorDataset(x), range(len(x))),
        lambda x: DataLoader(TensorDataset(x), batch_size=5),
        lambda x: [row.numpy() for row in x],
    ],
)
def test_one_number_that_changed_in_memory_is_found(tmp_path, held, row):
    E(same(), held(X), "0", tmp_path)
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    with pytest.raises(
        StoreMismatchError, match=r"data: rows? .* of the data (is|are) not the same|row .*read otherwise"
    ):
        E(same(), held(altered(row=row)), "0", tmp_path)
    assert torch.equal(E(same(), held(X.clone()), "0", tmp_path)["0"][:], X)


def test_map_style_data_is_known_by_rows_that_are_spread_over_it(tmp_path):
    E(same(), Map(X), "0", tmp_path)
    for other in (X.flip(0), torch.zeros_like(X), X + 1e-6, altered(row=0), altered(row=59), X.double()):
        with pytest.raises(StoreMismatchError, match=r"data: rows? .* of the data (is|are) read otherwise"):
            E(same(), Map(other.clone()), "0", tmp_path)
    again = Map(X)
    assert torch.equal(E(same(), again, "0", tmp_path)["0"][:], X)
    assert len(again.read) < 32  # only some rows are read to know it again


def test_the_rows_that_differ_are_named(tmp_path):
    E(same(), X, "0", tmp_path)
    with pytest.raises(StoreMismatchError, match=r"data: rows 20 to 23 of the data are not the same") as caught:
        E(same(), altered(), "0", tmp_path)
    assert "model" not in str(caught.value)


def test_other_ids_and_labels_are_other_data(tmp_path):
    ids = [f"row{i}" for i in range(60)]
    E(same(), X, "0", tmp_path, ids=ids, labels=list(range(60)))
    renamed = ["other" if i == 33 else name for i, name in enumerate(ids)]
    with pytest.raises(StoreMismatchError, match=r"the ids of rows 32 to 35 are others"):
        E(same(), X, "0", tmp_path, ids=renamed, labels=list(range(60)))
    with pytest.raises(StoreMismatchError, match=r"the labels of rows 0 to 3 are others"):
        E(same(), X, "0", tmp_path, ids=ids, labels=[7, *range(1, 60)])


def test_other_lengths_are_other_data(tmp_path):
    tokens = torch.randn(60, 6, 3)
    E(same(), tokens, "0", tmp_path, lengths=[3] * 60)
    with pytest.raises(StoreMismatchError, match=r"the lengths of rows 8 to 11 are others"):
        E(same(), tokens, "0", tmp_path, lengths=[3] * 10 + [4] + [3] * 49)
    assert len((tmp_path / "store.json").read_text()) < 4000
    assert [len(row) for row in E(same(), tokens, "0", tmp_path, lengths=[3] * 60)["0"]] == [3] * 60


def test_another_order_subset_or_collate_is_other_data(tmp_path):
    data = TensorDataset(X)

    def twice(rows):
        return torch.stack([row for (row,) in rows]) * 2

    def loader(indices, collate=None):
        return DataLoader(data, batch_size=5, sampler=list(indices), collate_fn=collate)

    E(same(), loader(range(60)), "0", tmp_path / "a")
    for other in (loader([1, 0, *range(2, 60)]), loader(range(60), twice)):
        with pytest.raises(StoreMismatchError, match=r"data, (order|collate)"):
            E(same(), other, "0", tmp_path / "a")
    E(same(), Subset(data, range(30)), "0", tmp_path / "b")
    with pytest.raises(StoreMismatchError, match="data, subset"):
        E(same(), Subset(data, [*range(29), 59]), "0", tmp_path / "b")


class Broken(Map):
    def __init__(self, rows, bad):
        super().__init__(rows)
        self.bad = bad

    def __getitem__(self, i):
        if i in self.bad:
            raise OSError("the network is gone")
        return super().__getitem__(i)


def test_a_row_that_could_not_be_read_the_first_time_is_no_difference(tmp_path):
    with pytest.raises(OSError, match="network"):
        E(same(), Broken(X, {59}), "0", tmp_path)
    assert torch.equal(E(same(), Broken(X, ()), "0", tmp_path)["0"][:], X)


# -- data that is another one each time -------------------------------------------------------------------


class Noisy(Map):
    def __getitem__(self, i):
        return super().__getitem__(i) + torch.randn(3) + random.random() + np.random.rand()


def test_data_that_does_not_repeat_is_said_to_be_so_and_can_still_be_gone_on_with(tmp_path):
    state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with pytest.warns(DataWarning, match=r"row 0 .* read twice.*not the same.*cannot be checked"):
        E(same(), Noisy(X), "0", tmp_path)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), str(np.random.get_state())) == state[1:]
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    with pytest.warns(DataWarning):
        assert len(E(same(), Noisy(X), "0", tmp_path)) == 60


class Flipped(Map):
    def __getitem__(self, i):
        return super().__getitem__(i) * (1 if torch.rand(()) < 0.5 else -1)


def test_data_that_is_the_same_every_other_time_is_found_not_to_repeat():
    for seed in range(40):
        torch.manual_seed(seed)
        assert not of_data(sources.source(Flipped(X), 5, 0, False), None, None, None)["repeats"]


def test_an_iterable_is_not_read_ahead(tmp_path):
    read = []

    def batches():
        for i, batch in enumerate(X.split(5)):
            read.append(i)
            yield batch

    features = E(same(), batches(), "0", tmp_path, batch_size=None)
    assert read == list(range(12))
    assert torch.equal(features["0"][:], X)


# -- folders ------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        image.fromarray(pixels).save(folder / f"{i:02d}.png")
    return folder


def go(folder, out, **settings):
    return E(flat(), ImageFolder(folder, size=8, crop=1.0, **settings), "1", out, rows_per_shard=10)


def test_a_renamed_file_is_other_data(tmp_path, photos):
    go(photos, tmp_path / "o")
    (tmp_path / "o" / "shards" / "s000000003.safetensors").unlink()
    (photos / "03.png").rename(photos / "99.png")
    with pytest.raises(StoreMismatchError, match=r"rows 3 to 5, .* of the data have files of other names or contents"):
        go(photos, tmp_path / "o")


def test_another_folder_of_the_same_length_and_an_exchanged_file_are_other_data(tmp_path, photos):
    go(photos, tmp_path / "o")
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    assert len(go(other, tmp_path / "o")) == 40  # a copy of the folder is the same data
    shutil.copy(other / "05.png", other / "06.png")
    with pytest.raises(StoreMismatchError, match="rows 6 to 8 of the data have files of other"):
        go(other, tmp_path / "o")


@pytest.mark.parametrize(
    "settings", [{"mean": (0.5, 0.5, 0.5)}, {"std": (1.0, 1.0, 1.0)}, {"interpolation": "nearest"}]
)
def test_another_preparation_is_other_data(tmp_path, photos, settings):
    go(photos, tmp_path / "o")
    with pytest.raises(StoreMismatchError, match=f"data, preparation: .*{next(iter(settings))}"):
        go(photos, tmp_path / "o", **settings)


def test_another_size_is_other_data(tmp_path, photos):
    E(flat(), ImageFolder(photos, size=8), "1", tmp_path / "o")
    with pytest.raises(StoreMismatchError, match=r"data, preparation: .*size.*8.*16"):
        E(flat(), ImageFolder(photos, size=16), "1", tmp_path / "o")


def test_folders_in_torchvisions_manner_are_known_by_their_files(tmp_path, photos):
    datasets = pytest.importorskip("torchvision.datasets")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    (photos / "a").mkdir()
    for path in list(photos.glob("*.png")):
        path.rename(photos / "a" / path.name)

    def call(size=4):
        prepare = v2.Compose([v2.ToImage(), v2.Resize(size), v2.ToDtype(torch.float32, scale=True)])
        return E(flat(), datasets.ImageFolder(photos, prepare), "1", tmp_path / "o")

    call()
    assert len(call()) == 40
    with pytest.raises(StoreMismatchError, match="data, preparation"):
        call(size=6)
    (photos / "a" / "03.png").rename(photos / "a" / "99.png")
    with pytest.raises(StoreMismatchError, match=r"rows 3 to 5, .* have files of other names"):
        call()
