"""Rows that are skipped: never too many, never for good, and never mistaken for others."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.extract import jobs
from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._features.verify import verify
from torchhook.errors import ExtractError

E = functools.partial(extract, progress=False, rows_per_shard=16, batch_size=8)
X, Y = jobs.data(200).tensors


class Faulty(Dataset):
    """Some rows cannot be read, for a while."""

    def __init__(self, bad=(), key=False):
        self.bad, self.key = set(bad), key

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if i in self.bad:
            raise OSError(f"row {i}: the network is gone")
        return {"x": X[i], "label": Y[i], "key": f"k{i}"} if self.key else (X[i], Y[i])


def truth(rows):
    return jobs.oracle(jobs.Net(), X.split(8), "second")["second"][rows]


# -- never too many ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "options", "raises"),
    [
        (range(20), {}, None),
        (range(21), {}, r"21 rows .* of 200.*max_skipped.*retry_skipped=True"),
        (range(5), {"max_skipped": 4}, "5 rows .*max_skipped=4"),
        (range(4), {"max_skipped": 4}, None),
        ([7], {"max_skipped": 0}, "1 row .*max_skipped=0"),
        (range(100), {"max_skipped": 0.5}, None),
        (range(101), {"max_skipped": 0.5}, r"101 rows .*max_skipped=0.5"),
    ],
)
def test_there_is_a_limit_to_what_is_skipped(tmp_path, bad, options, raises):
    call = functools.partial(E, jobs.Net(), Faulty(bad), "second", tmp_path, on_error="skip", **options)
    if raises is None:
        assert set(call().skipped) == set(bad)
    else:
        with pytest.raises(ExtractError, match=raises) as caught:
            call()
        assert "the network is gone" in str(caught.value)


def test_nan_rows_and_rows_of_a_stream_count_too(tmp_path):
    x = X.clone()
    x[:30] = float("nan")
    with pytest.raises(ExtractError, match=r"rows .*max_skipped"):
        E(jobs.Net(), x, "second", tmp_path / "a", on_error="skip")
    with pytest.raises(ExtractError, match=r"rows .*max_skipped=3"):
        E(jobs.Net(), iter(x.split(8)), "second", tmp_path / "b", on_error="skip", batch_size=None, max_skipped=3)
    for wrong in (-1, 1.5, True, "many"):
        with pytest.raises(ValueError, match="max_skipped"):
            E(jobs.Net(), X, "second", tmp_path / "c", on_error="skip", max_skipped=wrong)
    with pytest.raises(ValueError, match=r"max_skipped.*on_error='skip'"):
        E(jobs.Net(), X, "second", tmp_path / "c", max_skipped=3)


# -- never for good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_what_was_skipped_can_be_done_again(tmp_path, on_error):
    bad = {3, 40, 41, 199}
    E(jobs.Net(), Faulty(bad), "second", tmp_path, on_error="skip")
    untouched = {k: v for k, v in jobs.store_bytes(tmp_path).items() if k not in _names(0, 2, 12)}
    again = E(jobs.Net(), Faulty(), "second", tmp_path, on_error="skip")
    assert set(again.skipped) == bad  # not by itself: it may be that they never can be read
    assert "retry_skipped=True" in repr(again)
    features = E(jobs.Net(), Faulty({41} if on_error == "skip" else ()), "second", tmp_path, on_error=on_error,
                 retry_skipped=True)  # fmt: skip
    left = [41] if on_error == "skip" else []
    assert list(features.skipped) == left
    good = [i for i in range(200) if i not in left]
    assert torch.allclose(features["second"][good], truth(good), atol=1e-5)
    assert untouched.items() <= jobs.store_bytes(tmp_path).items()
    assert verify(tmp_path).ok


def _names(*numbers):
    return {f"s{number:09d}.safetensors" for number in numbers}


def test_a_retry_that_fails_leaves_nothing_half_done(tmp_path):
    E(jobs.Net(), Faulty({3, 199}), "second", tmp_path, on_error="skip")
    with pytest.raises(OSError, match="row 199"):
        E(jobs.Net(), Faulty({199}), "second", tmp_path, retry_skipped=True)
    assert open_features(tmp_path, incomplete=True).missing == [12]
    features = E(jobs.Net(), Faulty(), "second", tmp_path)
    assert features.skipped == {}
    assert torch.equal(features["second"][:], truth(slice(None)))


def test_a_stream_can_be_retried_too(tmp_path):
    class Touchy(jobs.Net):
        def __init__(self, gate):
            super().__init__()
            self.gate = gate

        def forward(self, x):
            if self.gate.seconds and bool((x == X[50]).all(1).any()):
                raise ArithmeticError("not now")
            return super().forward(x)

    def call(trouble, **options):
        model = Touchy(jobs.Clock(trouble))
        return E(model, iter(X.split(8)), "second", tmp_path, on_error="skip", batch_size=None, **options)

    assert set(call(1).skipped) == {50}
    features = call(0, retry_skipped=True)
    assert features.skipped == {}
    assert torch.equal(features["second"][:], truth(slice(None)))


def test_ranks_do_not_delete_each_others_shards(tmp_path, monkeypatch):
    E(jobs.Net(), Faulty({3}), "second", tmp_path, on_error="skip")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ExtractError, match="retry_skipped=True: ranks would delete"):
        E(jobs.Net(), Faulty(), "second", tmp_path, engine="torchrun", retry_skipped=True)


# -- never mistaken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[f"name {i}" for i in range(200)], list(range(1000, 1200)), "key", "number", None])
def test_skipped_rows_keep_their_ids_and_have_a_label_of_their_own(tmp_path, ids):
    data = Faulty({0, 20, 21, 199}, key=ids == "key")
    if ids == "number":
        ids = lambda batch: batch[1] + 500  # noqa: E731
    features = E(jobs.Net(), data, "second", tmp_path, on_error="skip", ids=ids)
    good = [i for i in range(200) if i not in data.bad]
    assert features.labels[[0, 20, 21, 199]].tolist() == [-1, -1, -1, -1]
    assert torch.equal(features.labels[good], Y[good])
    if isinstance(ids, list):
        assert list(features.ids[:]) == ids
    elif ids == "key":
        assert [features.ids[i] for i in (19, 20, 21, 22)] == ["k19", "", "", "k22"]
    elif ids is not None:
        assert features.ids[[19, 20, 22]].tolist() == [Y[19] + 500, -1, Y[22] + 500]


class Touchy(jobs.Net):
    def forward(self, x):
        if bool((x[:, 0] > 100).any()):
            raise ArithmeticError("too large for me")
        return super().forward(x)


@pytest.mark.parametrize("how", ["model", "nan"])
def test_rows_that_were_read_and_could_not_be_run_keep_the_ids_of_their_batch(tmp_path, how):
    x = X.clone()
    x[[3, 50], 0] = 1000 if how == "model" else float("nan")
    rows = [{"x": x[i], "label": f"class {i % 7}", "key": f"k{i}"} for i in range(200)]
    features = E(Touchy(), rows, "second", tmp_path, on_error="skip", ids="key")
    assert set(features.skipped) == {3, 50}
    assert list(features.ids[:]) == [f"k{i}" for i in range(200)]
    assert [features.labels[i] for i in (2, 3, 4, 50)] == ["class 2", "", "class 4", ""]


def test_labels_of_other_types_are_marked_as_well_as_they_can_be(tmp_path):
    for dtype, marked in ((torch.float32, "nan"), (torch.uint8, "255"), (torch.int16, "-1")):
        x = X.clone()
        x[3] = float("nan")
        data = torch.utils.data.TensorDataset(x, Y.to(dtype))
        features = E(jobs.Net(), data, "second", tmp_path / str(dtype), on_error="skip")
        assert str(features.labels[3].item()) == marked
        assert features.labels[4] == Y[4]


# -- casts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cast",
    [
        transforms.cast(torch.float16),
        transforms.compose(transforms.narrow(0, 3), transforms.cast(torch.half)),
        transforms.cast(torch.float8_e4m3fn),
        transforms.cast(torch.float8_e5m2),
        lambda value: value.half(),
    ],
)
def test_a_transform_that_casts_to_a_narrower_type_is_checked_for_infinities(tmp_path, cast):
    x = torch.tensor([[1.0] * 3, [448.0] * 3, [1e6] * 3, [-2.0] * 3])
    same = nn.Sequential(nn.Identity())
    with pytest.raises(ExtractError, match=r"infinity after the cast to torch\.float.* in 1 row \(2\)"):
        E(same, x, "0", tmp_path / "a", transform=cast)
    assert set(E(same, x, "0", tmp_path / "b", transform=cast, on_error="skip").skipped) == {2}
    wide = E(same, x, "0", tmp_path / "c", transform=transforms.cast(torch.bfloat16))
    assert wide["0"][2].isfinite().all()


def test_a_model_that_computes_in_half_precision_may_have_infinities_of_its_own(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3)).half()
    x = torch.full((4, 3), 6e4, dtype=torch.half)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert E(model, x, "0", tmp_path)["0"][0].isinf().all()


def test_rows_that_earlier_calls_skipped_count_too(tmp_path):
    """Else a loop that calls again and again would end with everything skipped."""
    data = Faulty(bad=range(0, 200, 10))
    for _ in range(8):
        with pytest.raises(ExtractError, match="max_skipped=2"):
            E(jobs.Net(), data, "second", tmp_path, on_error="skip", max_skipped=2)
    found = E(jobs.Net(), data, "second", tmp_path, on_error="skip", max_skipped=20)
    assert len(found.skipped) == 20
    with pytest.raises(ExtractError, match=r"skipped 20 rows of the store.*retry_skipped=True"):
        E(jobs.Net(), data, "second", tmp_path, on_error="skip", max_skipped=2)
    data.bad.clear()
    again = E(jobs.Net(), data, "second", tmp_path, on_error="skip", max_skipped=2, retry_skipped=True)
    assert len(again.skipped) == 0
