"""Statistics over a data set are numpy's of the values that bare hooks see, and the observers' of torch.ao."""

from __future__ import annotations

import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchhook as th
from tests.token_data import BOS, LENGTHS, MODELS, by_hand, cut, padded
from torchhook import transforms
from torchhook.errors import ExtractError, MissingRecordError, RecordingFileError
from torchhook.types import Statistics

SHARES = (0.0, 0.1, 0.5, 0.99, 1.0)


def check(found: Any, groups: list[np.ndarray]) -> None:
    """Against numpy, in double precision, one array for each number."""
    count = torch.as_tensor(found.count).expand(len(groups))
    assert count.tolist() == [len(group) for group in groups]
    np.testing.assert_allclose(found.mean, [g.mean() for g in groups], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.variance, [g.var(ddof=1) for g in groups], rtol=1e-9)
    np.testing.assert_allclose(found.std, [g.std(ddof=1) for g in groups], rtol=1e-9)
    np.testing.assert_array_equal(found.min, [g.min() for g in groups])
    np.testing.assert_array_equal(found.max, [g.max() for g in groups])
    np.testing.assert_array_equal(found.absmax, [np.abs(g).max() for g in groups])
    np.testing.assert_allclose(found.kurtosis, [(((g - g.mean()) / g.std()) ** 4).mean() for g in groups], rtol=1e-9)
    for q, numbers in found.quantiles.items():
        np.testing.assert_allclose(numbers, [np.quantile(g, q) for g in groups], rtol=1e-12)


def unpadded(model: nn.Module, site: str, data: dict[str, Tensor], size: int) -> list[np.ndarray]:
    """The values of each row at a site, by bare hooks, in the same batches."""
    batches = cut(data, size)
    values = by_hand(model, [site], batches)[site]
    return [
        row[mask.bool()].double().numpy()
        for value, batch in zip(values, batches, strict=True)
        for row, mask in zip(value, batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("per", ["channel", "tensor", "token"])
def test_they_are_numpys_of_what_hooks_see_without_the_padding(name: str, per: str) -> None:
    make, *sites = MODELS[name]
    model, data = make(), padded()
    options = {"covariance": True} if per == "channel" else {}
    found = th.statistics(model, data, sites, per=per, quantiles=SHARES, batch_size=4, resolution=4096, **options)
    assert list(found) == sites
    assert found.rows == len(LENGTHS)
    for site in sites:
        rows = unpadded(model, site, data, 4)
        flat = np.concatenate(rows)
        groups = {
            "channel": list(flat.T),
            "tensor": [flat.ravel()],
            "token": [np.concatenate([row[p] for row in rows if len(row) > p]) for p in range(max(LENGTHS))],
        }[per]
        check(found[site], groups)
        if per == "channel":
            np.testing.assert_allclose(found[site].covariance, np.cov(flat.T), rtol=1e-7, atol=1e-12)
        assert found[site].rank_error == 0


def test_padding_on_the_left_counts_positions_from_the_first_token() -> None:
    make, site, _ = MODELS["llama"]
    model, data = make(), padded("left")
    found = th.statistics(model, data, site, per="token", batch_size=4)[site]
    rows = unpadded(model, site, data, 4)
    check(found, [np.concatenate([row[p] for row in rows if len(row) > p]) for p in range(max(LENGTHS))])


def test_special_tokens_are_left_out_and_top_rows_found_by_position() -> None:
    make, site, _ = MODELS["gpt2"]
    model, data = make(), padded()
    found = th.statistics(model, data, site, batch_size=4, drop_special=[BOS], top=3, first_row=100)[site]
    rows = [row[1:] for row in unpadded(model, site, data, 4)]
    check(found, list(np.concatenate(rows).T))
    for channel in (0, 7, 31):
        best = sorted((-row[:, channel].max(), i) for i, row in enumerate(rows) if len(row))[:3]
        assert found.top_rows[channel].tolist() == [100 + i for _, i in best]
        assert found.top_values[channel].tolist() == [-value for value, _ in best]
        for (_, i), at in zip(best, found.top_positions[channel].tolist(), strict=True):
            assert rows[i][:, channel].argmax() == at  # counted among those that are left


def test_positions_are_counted_among_the_tokens_that_are_left() -> None:
    make, site, _ = MODELS["llama"]
    model, data = make(), padded("left")
    found = th.statistics(model, data, site, per="token", batch_size=4, drop_special=[BOS])[site]
    rows = [row[1:] for row in unpadded(model, site, data, 4)]
    check(found, [np.concatenate([row[p] for row in rows if len(row) > p]) for p in range(max(LENGTHS) - 1)])


def test_images_have_their_channels_first_and_rows_may_be_vectors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 36, 4)).eval()
    images = torch.randn(20, 3, 8, 8)
    found = th.statistics(model, images, ["0", "2"], quantiles=[0.5], batch_size=6)
    with torch.no_grad():
        maps = torch.cat([model[0](part) for part in images.split(6)])
        last = torch.cat([model(part) for part in images.split(6)])
    check(found["0"], list(maps.transpose(0, 1).flatten(1).double().numpy()))
    check(found["2"], list(last.T.double().numpy()))
    rows = th.statistics(model, images, "0", channel=-1, batch_size=6)["0"]
    check(rows, list(maps.permute(3, 0, 1, 2).flatten(1).double().numpy()))


def test_min_and_max_are_those_of_the_observers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()).eval()
    images = torch.randn(24, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is on its way out of torch
        from torch.ao.quantization import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

        observers = [MinMaxObserver(), HistogramObserver(), PerChannelMinMaxObserver(ch_axis=1)]
        with torch.no_grad():
            for part in images.split(8):
                for observer in observers:
                    observer(model[0](part))
    tensor = th.statistics(model, images, "0", per="tensor", batch_size=8)["0"]
    channel = th.statistics(model, images, "0", per="channel", batch_size=8)["0"]
    for observer in observers[:2]:
        assert tensor.min.float().item() == observer.min_val.item()
        assert tensor.max.float().item() == observer.max_val.item()
    assert torch.equal(channel.min.float(), observers[2].min_val)
    assert torch.equal(channel.max.float(), observers[2].max_val)


def test_quantiles_of_much_data_are_within_their_bound() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 4) ** 3
    found = th.statistics(nn.Sequential(nn.Identity()), x, "0", quantiles=[0.5, 0.9], resolution=64)["0"]
    assert 0 < found.rank_error <= np.log2(3000 / 64) / 128 + 1 / 3000
    for q, numbers in found.quantiles.items():
        assert ((x.double() < numbers).double().mean(0) <= q + found.rank_error).all()
        assert ((x.double() <= numbers).double().mean(0) >= q - found.rank_error).all()
    assert torch.equal(found.quantile(0.5), found.quantiles[0.5])


# -- parts of the data -----------------------------------------------------------------------------------------


def parts(per: str, sizes: list[int]) -> tuple[list[Statistics], Statistics]:
    torch.manual_seed(0)
    x, model = torch.randn(sum(sizes), 6, 3), nn.Sequential(nn.Identity(), nn.Tanh())
    options: dict[str, Any] = {"per": per, "quantiles": [0.25, 0.5], "top": 2, "covariance": per == "channel"}
    ends = np.cumsum([0, *sizes])
    found = [th.statistics(model, x[a:b], ["0", "1"], first_row=int(a), **options) for a, b in itertools.pairwise(ends)]
    return found, th.statistics(model, x, ["0", "1"], **options)


def same(one: Statistics, other: Statistics, exactly: bool = False) -> None:
    assert one.rows == other.rows
    for site in other:
        mine, theirs = one[site], other[site]
        for name in ("count", "min", "max", "absmax", "top_values", "top_rows", "top_positions"):
            assert torch.equal(torch.as_tensor(getattr(mine, name)), torch.as_tensor(getattr(theirs, name)))
        for name in ("mean", "variance", "kurtosis"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(a, b) if exactly else torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        for q in (0.25, 0.5):
            assert torch.equal(mine.quantile(q), theirs.quantile(q))


@pytest.mark.parametrize("per", ["channel", "tensor", "token"])
def test_parts_add_up_to_one_pass_over_all(per: str) -> None:
    found, whole = parts(per, [5, 1, 30, 12])
    same(sum(found), whole)
    same(found[0].merge(*found[1:]), whole)
    same(found[0] + found[3] + found[2] + found[1], whole)  # ranks come in any order
    same(pickle.loads(pickle.dumps(whole)), whole, exactly=True)


def test_statistics_of_other_kinds_or_sites_do_not_merge() -> None:
    (one, *_), _ = parts("channel", [5, 1])
    (other, *_), _ = parts("tensor", [5, 1])
    with pytest.raises(ValueError, match="statistics of two kinds do not merge"):
        one + other
    model = nn.Sequential(nn.Identity())
    three, four = (th.statistics(model, torch.randn(4, n), "0") for n in (3, 4))
    with pytest.raises(ValueError, match="'0': 3 channels and 4 do not merge"):
        three + four
    with pytest.raises(TypeError):
        three + 1


# -- files and shows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["channel", "tensor", "token"])
def test_they_are_saved_as_one_file_that_any_reader_opens(per: str, tmp_path: Path) -> None:
    found, whole = parts(per, [20, 28])
    path = whole.save(tmp_path / "s.safetensors")
    same(Statistics.load(path), whole, exactly=True)
    raw = load_file(path)
    assert torch.equal(raw["0|max"], whole["0"].max)
    halves = [Statistics.load(one.save(tmp_path / f"{i}.safetensors")) for i, one in enumerate(found)]
    same(sum(halves), whole)  # each rank writes its own, and somebody adds them up
    assert Statistics.load(path).options == whole.options


def test_other_files_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    with th.capture(model, "0") as rec:
        model(torch.ones(1))
    with pytest.raises(RecordingFileError, match=r"holds no statistics: its format is 'torchhook.recording'"):
        Statistics.load(rec.save(tmp_path / "r.safetensors"))
    path = th.statistics(model, torch.ones(3, 2), "0").save(tmp_path / "s.safetensors")
    with pytest.raises(RecordingFileError, match=r"its format is 'torchhook.statistics'"):
        th.load(path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingFileError, match="altered"):
        Statistics.load(path)


def test_they_print_as_a_table_and_are_a_mapping_of_sites() -> None:
    model = nn.Sequential(nn.Identity())
    found = th.statistics(model, torch.tensor([[1.0, 2.0], [3.0, 6.0]]), ["0", "(model)"], quantiles=[0.5])
    assert str(found) == (
        "Statistics\n"
        "site     channels  count   mean            std    min    max  absmax  kurtosis\n"
        "------------------------------------------------------------------------------\n"
        "0               2      2  2 … 4  1.414 … 2.828  1 … 2  3 … 6   3 … 6         1\n"
        "(model)         2      2  2 … 4  1.414 … 2.828  1 … 2  3 … 6   3 … 6         1\n"
        "2 rows, per channel\n"
        "quantiles 0.5: exact"
    )
    assert "<table" in found._repr_html_()
    assert "(model)" in found
    assert found["(model)"] is found[""]
    assert repr(found["0"]) == "<statistics of 2 values, 2 numbers of each kind>"
    with pytest.raises(MissingRecordError, match="no statistics of '1'"):
        found["1"]
    with pytest.raises(ValueError, match="no quantiles are known"):
        th.statistics(model, torch.ones(2, 2), "0")["0"].quantile(0.5)


# -- the model, and what is refused ----------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {name: part.clone() for name, part in model.state_dict().items()}
    numbers = torch.get_rng_state()
    loader = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=6, shuffle=True)
    torch.set_rng_state(numbers)
    th.statistics(model, loader, "2")
    assert model.training
    assert model[2].training
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_transform_and_lengths_are_as_in_extract() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.randn(6, 5, 3)
    lengths = torch.tensor([5, 2, 3, 1, 4, 5])
    some = th.statistics(model, TensorDataset(x, lengths), "0", lengths=1)["0"]
    check(some, list(x[torch.arange(5) < lengths[:, None]].double().numpy().T))
    top = th.statistics(model, x, "0", transform=transforms.pool("max"))["0"]
    check(top, list(x.amax(1).double().numpy().T))
    rows = th.statistics(model, x, "0", transform=lambda v: transforms.Rows(v.unbind()))["0"]
    check(rows, list(x.flatten(0, 1).double().numpy().T))


def test_memory_does_not_grow_with_the_data() -> None:
    def kept(rows: int) -> int:
        batches = (torch.randn(64, 8) for _ in range(rows // 64))
        found = th.statistics(nn.Sequential(nn.Identity()), batches, "0", quantiles=[0.5], top=4, resolution=64)
        return sum(part.nbytes for part in found["0"].tensors().values())

    assert kept(64 * 400) < 3 * kept(64 * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "row"}, "per='row': use 'channel', 'tensor', 'token'"),
        ({"per": "tensor", "covariance": True}, "covariance=True is that of channels"),
        ({"quantiles": [1.5]}, "shares of the values, from 0 to 1"),
        ({"channel": 3}, r"channel=3: a row has the shape \(5, 3\)"),
        ({"top": -1}, "^top=-1: give a number of rows, 0 or more"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        th.statistics(nn.Sequential(nn.Identity()), torch.randn(4, 5, 3), "0", **options)


def test_no_values_and_changing_channels_are_refused() -> None:
    model = nn.Sequential(nn.Identity())
    with pytest.raises(ExtractError, match="the data has no rows"):
        th.statistics(model, torch.empty(0, 3), "0")
    with pytest.raises(ExtractError, match="3 channels in the first batch, 4 now"):
        th.statistics(model, iter([torch.ones(2, 3), torch.ones(2, 4)]), "0")
    ids = nn.Sequential(nn.Embedding(9, 3))
    with pytest.raises(ExtractError, match="neither padding nor special"):
        th.statistics(ids, torch.ones(2, 3, dtype=torch.long), "0", drop_special=[1])
