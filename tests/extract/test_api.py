"""``extract`` against bare hooks with ``.clone()``: what is stored, what is left in the model, what resumes."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
import types
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.extract import jobs
from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._extract.estimate import Estimate
from torchhook._features.api import Features, open_features
from torchhook._features.verify import verify
from torchhook.errors import ExtractError, PaddingWarning, SelectorError, StoreMismatchError


def do(out, model=None, data=None, sites=("first", "second"), **options) -> Features:
    options = {"batch_size": 16, "rows_per_shard": 32, "progress": False, **options}
    found = extract(
        jobs.Net() if model is None else model, jobs.data(100) if data is None else data, list(sites), out, **options
    )
    assert isinstance(found, Features)
    return found


@pytest.fixture
def truth():
    return jobs.oracle(jobs.Net(), jobs.data(100).tensors[0].split(16), "first", "second")


class Counting(jobs.Net):
    """Counts in an object, which nobody puts back as the model's own attributes are."""

    def __init__(self):
        super().__init__()
        self.ran = types.SimpleNamespace(calls=0, heads=0)

    def forward(self, x):
        self.ran.calls += 1
        found = super().forward(x)
        self.ran.heads += 1
        return found


def test_what_is_stored_is_what_the_layers_produced(tmp_path, truth):
    features = do(tmp_path)
    for name, expected in truth.items():
        assert torch.equal(features[name][:], expected)
    assert torch.equal(features.labels[:], torch.arange(100) % 7)
    assert features.keys() == ["first", "second"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "shards", "store.json"]


def test_the_forward_pass_ends_at_the_last_layer_needed(tmp_path):
    model = Counting()
    do(tmp_path, model)
    assert model.ran.calls == 7
    assert model.ran.heads == 1  # the first batch, which is measured


def test_the_batch_that_is_measured_is_neither_loaded_nor_run_again(tmp_path, truth):
    class Loads(torch.utils.data.Dataset):
        def __init__(self):
            self.rows, self.loaded = jobs.data(100), Counter()

        def __len__(self):
            return 100

        def __getitem__(self, row):
            self.loaded[row] += 1
            return self.rows[row]

    for number, rows_per_shard in enumerate((16, 40, 100)):
        data, model = Loads(), Counting()
        features = do(tmp_path / str(number), model, data=data, rows_per_shard=rows_per_shard)
        # A few rows are also read, some of them twice, to know the data again.
        known = {round(i * 99 / 15) for i in range(16)}
        assert {times for row, times in data.loaded.items() if row not in known} == {1}
        assert sorted(data.loaded[row] for row in known) == [2] * 8 + [3] * 8
        assert model.ran.heads == 1
        for name, expected in truth.items():
            torch.testing.assert_close(features[name][:], expected)


def test_a_first_batch_that_reaches_over_the_first_shard_is_cut_there(tmp_path, truth):
    features = do(tmp_path, rows_per_shard=10)
    for name, expected in truth.items():
        torch.testing.assert_close(features[name][:], expected)


def test_the_model_and_the_process_are_as_before(tmp_path):
    model = jobs.Net().train()
    model.relu.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    do(tmp_path, model)
    assert model.training
    assert model.second.training
    assert not model.relu.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


class Restless(nn.Module):
    """Draws random numbers and counts its calls, in whatever mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.9)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("newest", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        made = nn.functional.dropout(self.linear(x), 0.5, training=True)
        self.newest = made[0]
        return self.norm(made)


class Drawing(torch.utils.data.Dataset):
    """Augments with every generator there is."""

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.rand(8) + random.random() + np.random.rand()


@pytest.mark.filterwarnings("ignore::torchhook.errors.DataWarning")
def test_random_numbers_buffers_and_gradients_are_as_before(tmp_path):
    model = Restless().train()
    model.linear(torch.ones(1, 8)).sum().backward()
    gradients = [(p.grad, None if p.grad is None else p.grad.clone(), p.requires_grad) for p in model.parameters()]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    numbers = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    shuffled = DataLoader(Endless(torch.randn(40, 8, generator=torch.Generator().manual_seed(0))), batch_size=16)
    for name, data in {"rows": Drawing(), "stream": shuffled}.items():
        do(tmp_path / name, model, data, ["norm"])
        extract(model, data, "norm", tmp_path / "dry", dry_run=True)
        with pytest.raises(KeyError):
            do(tmp_path / f"{name} fails", model, data, ["norm"], transform=lambda value: {}["x"])
        assert torch.equal(torch.get_rng_state(), numbers[0])
        assert random.getstate() == numbers[1]
        assert str(np.random.get_state()) == numbers[2]
        assert all(buffer is buffers[name][0] for name, buffer in model.named_buffers())
        assert all(torch.equal(buffer, buffers[name][1]) for name, buffer in model.named_buffers())
    for parameter, (gradient, value, learns) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert parameter.requires_grad == learns
        assert value is None or torch.equal(gradient, value)


def test_another_thread_does_not_turn_back_the_main_threads_random_numbers(tmp_path):
    before = torch.get_rng_state()
    drawn = []

    def transform(value):
        drawn.append(torch.rand(()))  # as a main thread that trains would meanwhile
        return value

    thread = threading.Thread(target=do, args=(tmp_path,), kwargs={"transform": transform})
    thread.start()
    thread.join()
    assert drawn
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)


def test_features_are_those_of_evaluation_mode(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).train()
    features = do(tmp_path, model, sites=["1"])
    with torch.no_grad():
        assert torch.allclose(features["1"][:], model[0](jobs.data(100).tensors[0]), atol=1e-6)


def test_only_missing_shards_are_done_again(tmp_path):
    do(tmp_path)
    whole = jobs.store_bytes(tmp_path)
    (tmp_path / "shards" / "s000000001.safetensors").unlink()
    do(tmp_path)
    assert jobs.store_bytes(tmp_path) == whole
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    model, calls = jobs.Net(), []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    do(tmp_path, model)
    assert len(calls) == 1 + 2
    assert jobs.store_bytes(tmp_path) == whole


def test_the_bytes_do_not_depend_on_workers(tmp_path):
    do(tmp_path / "a")
    do(tmp_path / "b", workers=2)
    assert jobs.store_bytes(tmp_path / "a") == jobs.store_bytes(tmp_path / "b")


def test_begin_again_replaces_a_store(tmp_path):
    do(tmp_path)
    features = do(tmp_path, jobs.Net(seed=5), resume=False)
    assert torch.equal(
        features["first"][:], jobs.oracle(jobs.Net(5), jobs.data(100).tensors[0].split(16), "first")["first"]
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": jobs.Net(seed=3)}, r"model: other numbers in 6 of 6 tensors \(first.weight, first.bias"),
        ({"sites": ["first"]}, "sites: the store has first, second, this run first"),
        (
            {"transform": transforms.cast(torch.float32)},
            r"transform: the store has None, this run cast\(torch.float32\)",
        ),
        ({"data": jobs.data(99)}, "rows: the store has 100, this run 99"),
        ({"dtype": torch.float16}, "dtype: the store has None, this run float16"),
        ({"rows_per_shard": 48}, "rows per shard: the store has 32, this run 48"),
        ({"labels": False}, "columns"),
    ],
)
def test_another_run_is_refused_with_the_difference_named(tmp_path, changes, text):
    do(tmp_path)
    whole = jobs.store_bytes(tmp_path)
    with pytest.raises(StoreMismatchError, match=text):
        do(tmp_path, **changes)
    assert jobs.store_bytes(tmp_path) == whole


def test_a_model_trained_further_by_one_number_is_another_model(tmp_path):
    do(tmp_path)
    model = jobs.Net()
    with torch.no_grad():
        model.head.weight[2, 7] += 1e-3
    with pytest.raises(StoreMismatchError, match="model"):
        do(tmp_path, model)


def test_shards_are_as_large_as_asked_for(tmp_path):
    row = (16 + 12) * 4
    features = do(tmp_path / "a", rows_per_shard=None, shard_bytes=row * 50)
    assert features.manifest.rows_per_shard == 48  # whole batches of 16
    assert do(tmp_path / "b", rows_per_shard=None).manifest.rows_per_shard == 16  # at least four shards
    again = do(tmp_path / "a", rows_per_shard=None)
    assert again.manifest.rows_per_shard == 48
    assert do(tmp_path / "c", rows_per_shard=10)["first"].shape == (100, 16)


def test_a_dry_run_measures_and_writes_nothing(tmp_path):
    found = extract(jobs.Net(), jobs.data(100), "first", tmp_path / "x", dry_run=True, rows_per_shard=50)
    assert isinstance(found, Estimate)
    assert found.nbytes == 100 * 16 * 4
    assert found.todo == 2
    assert found.seconds > 0
    assert "100 rows, 6.2 KiB in 2 shards" in str(found)
    assert not (tmp_path / "x").exists()


def test_progress_shows_rows_and_bytes(tmp_path, capsys):
    do(tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert "100 rows, 10.9 KiB in 4 shards, 4 to do" in shown
    assert "rows/s" in shown
    assert "MB/s" in shown


# -- transforms, dtypes, values ------------------------------------------------------------------


def test_transforms_and_casts_run_in_the_hook(tmp_path, truth):
    features = do(tmp_path, transform={"second": transforms.narrow(0, 3)}, dtype=torch.bfloat16)
    assert torch.equal(features["first"][:], truth["first"].bfloat16())
    assert torch.equal(features["second"][:], truth["second"][:, :3].bfloat16())


def test_several_tensors_of_one_layer_are_several_columns(tmp_path, truth):
    features = do(tmp_path, sites=["first"], transform=transforms.topk(3))
    assert features.keys() == ["first[values]", "first[indices]"]
    assert torch.equal(features["first[values]"][:], truth["first"].topk(3).values)
    assert torch.equal(features["first[indices]"][:], truth["first"].topk(3).indices)


def test_a_transform_may_be_keyed_by_any_selector(tmp_path, truth):
    narrow, wide = transforms.narrow(0, 2), transforms.narrow(0, 5)
    net = jobs.Net()
    ways = [
        {"*": narrow, "second": wide},
        {nn.Linear: narrow, "second": wide},
        {"s*": wide, "fi*": narrow},
        {net.first: narrow, "second": wide},
        {re.compile("fir"): narrow, (lambda name, module: name == "second"): wide},
        {("first", "head"): narrow, "second": wide},
    ]
    for i, keys in enumerate(ways):
        features = do(tmp_path / str(i), net, transform=keys)
        assert torch.equal(features["first"][:], truth["first"][:, :2])
        assert torch.equal(features["second"][:], truth["second"][:, :5])
        assert features.manifest.transform == f"{{first: {narrow}, second: {wide}}}"
    features = do(tmp_path / "none", net, transform={"*": narrow, "second": None})
    assert torch.equal(features["second"][:], truth["second"])
    calls = do(tmp_path / "calls", sites=["relu#0", "relu#1", "first:input"], transform={"relu": narrow})
    assert [calls[site].shape[1] for site in calls] == [2, 2, 8]
    with pytest.raises(ExtractError, match=r"'\*' and <class '.*Linear'> all mean 'first'"):
        do(tmp_path / "two", transform={"*": narrow, nn.Linear: wide})
    with pytest.raises(ExtractError, match=r"transform\['head'\]: no such site is kept. There are: 'first'"):
        do(tmp_path / "other", transform={"head": narrow})
    for wrong in ("mean", {"first": "mean"}):
        with pytest.raises(TypeError, match=r"transform.* must be callable, found str"):
            do(tmp_path / "wrong", transform=wrong)


def test_inputs_of_layers_can_be_stored(tmp_path):
    assert torch.equal(do(tmp_path, sites=["first:input"])["first:input"][:], jobs.data(100).tensors[0])


@pytest.mark.shows("Precision: extract under autocast")
def test_autocast_is_part_of_the_run(tmp_path):
    features = do(tmp_path, autocast=torch.bfloat16)
    assert features["first"].dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.cat([jobs.Net().first(x) for x in jobs.data(100).tensors[0].split(16)])
    assert torch.equal(features["first"][:], expected)


def test_a_module_that_runs_twice_must_be_asked_for_by_call(tmp_path):
    with pytest.raises(ExtractError, match=r"'relu' runs 2 times in one forward pass.*'relu#0' to 'relu#1'"):
        do(tmp_path, sites=["relu"])
    features = do(tmp_path, sites=["relu#1", "relu#0"])
    seen = []
    model = jobs.Net().eval()
    model.relu.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    with torch.no_grad():
        for x in jobs.data(100).tensors[0].split(16):
            model(x)
    assert torch.equal(features["relu#0"][:], torch.cat(seen[0::2]))
    assert torch.equal(features["relu#1"][:], torch.cat(seen[1::2]))


def test_a_wrong_name_and_a_layer_that_never_runs_are_errors(tmp_path):
    with pytest.raises(SelectorError, match="Closest: 'first'"):
        do(tmp_path, sites=["frist"])
    model = jobs.Net()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ExtractError, match="'spare' did not run"):
        do(tmp_path, model, sites=["spare"])
    with pytest.raises(ExtractError, match="parameter"):
        do(tmp_path, sites=["first.weight"])
    with pytest.raises(ExtractError, match=r"transform\['third'\].*'first', 'second'"):
        do(tmp_path, transform={"third": transforms.pool()})
    assert not (tmp_path / "store.json").exists()


def test_the_model_itself_is_a_site_too(tmp_path):
    with torch.no_grad():
        expected = jobs.Net()(jobs.data(100).tensors[0])
    for i, sites in enumerate(([lambda name, module: name == ""], ["(model)"])):
        features = do(tmp_path / str(i), sites=sites)
        assert features.keys() == [""]
        assert all(name in features for name in ("", "(model)"))
        assert torch.allclose(features["(model)"][:], expected, atol=1e-4)
        assert torch.equal(features[""][:], features["(model)"][:])
        assert torch.equal(features.dataset("(model)", labels=False)[[3]], features[""][[3]])
        assert "(model)  F32(4)" in str(features)
    given = do(tmp_path / "in", sites=["(model):input"])
    assert torch.equal(given["(model):input"][:], jobs.data(100).tensors[0])
    top = do(tmp_path / "top", sites=["(model)"], transform={"(model)": transforms.topk(2)})
    assert torch.equal(top["(model)[indices]"][:], top["[indices]"][:])
    with pytest.raises(ExtractError, match=r"'\(model\)': 1 row for a batch of 16"):
        do(tmp_path / "rows", sites=["(model)"], transform=lambda value: value[:1])


def test_a_value_without_rows_is_refused(tmp_path):
    with pytest.raises(ExtractError, match="'first': 1 row for a batch of 16"):
        do(tmp_path, sites=["first"], transform=lambda value: value.mean(0, keepdim=True))


# -- variable lengths -------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.pool = nn.Identity()

    def forward(self, input_ids, attention_mask=None):
        found = self.embed(input_ids)
        return self.pool(found.mean(1))


def sentences(rows=30):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 9, (rows,), generator=generator).tolist()
    return [torch.randint(0, 50, (n,), generator=generator) for n in lengths]


def pad(rows):
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = row, 1  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def test_rows_of_different_lengths_are_stored_end_to_end(tmp_path):
    rows, model = sentences(), Tokens()
    loader = DataLoader(rows, batch_size=4, collate_fn=pad)
    with pytest.warns(PaddingWarning, match="'pool': row . of a batch has other features alone"):  # its mean has pads
        features = do(
            tmp_path, model, loader, ["embed", "pool"], lengths="attention_mask", rows_per_shard=8, batch_size=None
        )
    assert features["embed"].shape == (30, None, 6)
    assert features["pool"].shape == (30, 6)
    for i, row in enumerate(rows):
        assert torch.equal(features["embed"][i], model.embed(row).detach())
    assert [len(r) for r in features["embed"][5:20]] == [len(r) for r in rows[5:20]]
    assert [len(r) for r in features["embed"][[-1, 3]]] == [len(rows[-1]), len(rows[3])]


def test_lengths_and_rows_are_two_other_ways_to_say_it(tmp_path):
    rows, model = sentences(), Tokens()

    def right(samples):
        return {
            "input_ids": nn.utils.rnn.pad_sequence(samples, batch_first=True),
            "n": torch.tensor([*map(len, samples)]),
        }

    def inside(value):
        return transforms.Rows(row[: i % 3] for i, row in enumerate(value))

    loader = DataLoader(rows, batch_size=4, collate_fn=right)
    features = do(tmp_path / "a", model, loader, ["embed"], lengths=lambda b: b["n"], rows_per_shard=8, batch_size=None)
    assert all(torch.equal(features["embed"][i], model.embed(row).detach()) for i, row in enumerate(rows))
    features = do(tmp_path / "b", jobs.Net(), sites=["first"], transform=inside)
    assert [len(row) for row in features["first"]][:18] == [*([0, 1, 2] * 5), 0, 0, 1]
    assert verify(tmp_path / "b").ok


def test_a_layer_that_changes_shape_is_an_error_that_says_what_to_do(tmp_path):
    loader = DataLoader(sentences(), batch_size=4, collate_fn=pad)
    with pytest.raises(
        ExtractError, match=r"'embed': rows of shape \(\d, 6\) in the first batch.*Rows \d+ to \d+.*lengths="
    ):
        do(tmp_path, Tokens(), loader, ["embed"], rows_per_shard=4, batch_size=None)
    assert all(p.kind == "missing" for p in verify(tmp_path).problems)


# -- kinds of data -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize(
    ("collate", "options"),
    [
        (lambda rows: torch.stack([r[0] for r in rows]), {}),
        (lambda rows: [torch.stack([r[0] for r in rows])], {}),
        (lambda rows: {"x": torch.stack([r[0] for r in rows]), "label": torch.stack([r[1] for r in rows])}, {}),
        (lambda rows: {"pixels": torch.stack([r[0] for r in rows]), "y": torch.stack([r[1] for r in rows])}, {}),
        (lambda rows: Sample(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])), {}),
        (lambda rows: {"a": {"b": torch.stack([r[0] for r in rows])}}, {"input_fn": lambda b: b["a"]["b"]}),
        (lambda rows: {"a": {"b": torch.stack([r[0] for r in rows])}}, {"input_fn": lambda b: {"x": b["a"]["b"]}}),
    ],
)
def test_any_structure_of_batches_is_understood(tmp_path, truth, collate, options):
    loader = DataLoader(jobs.data(100), batch_size=16, collate_fn=collate)
    features = do(tmp_path, data=loader, batch_size=None, **options)
    assert torch.equal(features["second"][:], truth["second"])
    batch = collate([jobs.data(1)[0]])
    has_labels = isinstance(batch, Sample) or (isinstance(batch, dict) and {"y", "label"} & set(batch))
    assert (features.labels is not None) == bool(has_labels)


def test_fields_that_the_model_does_not_take_are_an_error(tmp_path):
    loader = DataLoader(jobs.data(10), collate_fn=lambda rows: {"p": rows[0][0], "q": rows[0][0]})
    with pytest.raises(ExtractError, match=r"fields 'p', 'q', and the model's forward takes 'x'.*input_fn"):
        do(tmp_path, data=loader)


def test_ids_and_labels_travel_with_the_rows(tmp_path):
    names = [f"bild-{i}-ä.png" if i % 9 else "" for i in range(100)]
    features = do(tmp_path / "a", ids=names, labels=lambda batch: batch[0][:, :2])
    assert features.ids[7] == "bild-7-ä.png"
    assert list(features.ids) == names
    assert features.ids[[0, -1]] == ["", names[-1]]
    assert torch.equal(features.labels[:], jobs.data(100).tensors[0][:, :2])
    assert list(do(tmp_path / "b", ids=1).ids[:10]) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    with pytest.raises(ExtractError, match="ids= has 3 values, the data 100 rows"):
        do(tmp_path / "c", ids=["a", "b", "c"])
    with pytest.raises(ExtractError, match="labels='klass': the batches have no such field"):
        do(tmp_path / "d", labels="klass")


def test_a_loader_keeps_its_sampler_if_that_repeats_itself(tmp_path, truth):
    odd = list(range(1, 100, 2))
    loader = DataLoader(jobs.data(100), batch_size=16, sampler=odd)
    features = do(tmp_path / "a", data=loader, batch_size=None)
    assert torch.allclose(features["first"][:], truth["first"][odd], atol=1e-5)
    batches = DataLoader(jobs.data(100), batch_sampler=[[3, 1], [2], [5, 4, 6]])
    features = do(tmp_path / "b", data=batches, batch_size=None)
    assert torch.allclose(features["first"][:], truth["first"][[3, 1, 2, 5, 4, 6]], atol=1e-5)
    with pytest.raises(ExtractError, match="shuffle=False"):
        do(tmp_path / "c", data=DataLoader(jobs.data(100), batch_size=16, shuffle=True))


def test_tensors_arrays_and_lists_are_data_sets(tmp_path, truth):
    x = jobs.data(100).tensors[0]
    for i, data in enumerate((x, x.numpy(), list(x), TensorDataset(x))):
        assert torch.equal(do(tmp_path / str(i), data=data)["first"][:], truth["first"])
    with pytest.raises(TypeError, match="data is a int"):
        do(tmp_path / "z", data=3)
    with pytest.raises(ExtractError, match="no rows"):
        do(tmp_path / "z", data=x[:0])


class Endless(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("kind", ["batches", "rows", "iterable set", "loader", "uneven"])
def test_iterables_without_a_length_are_read_to_their_end(tmp_path, truth, kind):
    x = jobs.data(100).tensors[0]
    data, size = {
        "batches": (lambda: (b for b in x.split(16)), None),
        "rows": (lambda: iter(x), 16),
        "iterable set": (lambda: Endless(x), 16),
        "loader": (lambda: DataLoader(Endless(x), batch_size=16, num_workers=1), None),
        "uneven": (lambda: (b for b in x.split([5, 16, 20, 3, 16, 30, 10])), None),
    }[kind]
    features = do(tmp_path, data=data(), batch_size=size)
    assert len(features) == 100
    assert torch.allclose(features["second"][:], truth["second"], atol=1e-4)
    whole = jobs.store_bytes(tmp_path)
    for k in (1, 3):
        (tmp_path / "shards" / f"s00000000{k}.safetensors").unlink()
    assert len(do(tmp_path, data=data(), batch_size=size)) == 100
    assert jobs.store_bytes(tmp_path) == whole


def test_a_stream_in_another_order_is_refused(tmp_path):
    x = jobs.data(100).tensors[0]
    do(tmp_path, data=iter(x.split(16)), batch_size=None)
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    with pytest.raises(ExtractError, match="from row 0 on, the data is not what shard 0 was made of"):
        do(tmp_path, data=iter(x.flip(0).split(16)), batch_size=None)
    assert [p.shard for p in verify(tmp_path).problems] == [2]


def test_a_stream_that_has_grown_is_refused(tmp_path):
    x = jobs.data(100).tensors[0]
    do(tmp_path, data=iter(x[:90].split(16)), batch_size=None)
    with pytest.raises(ExtractError, match="rows"):
        do(tmp_path, data=iter(x.split(16)), batch_size=None)


def test_a_stream_that_broke_off_goes_on_where_it_stopped(tmp_path, truth):
    x = jobs.data(100).tensors[0]

    def broken():
        yield from x[:64].split(16)
        raise ConnectionError("the line is dead")

    with pytest.raises(ConnectionError, match="the line is dead"):
        do(tmp_path, data=broken(), batch_size=None)
    assert len(jobs.store_bytes(tmp_path)) == 2
    assert len(open_features(tmp_path, incomplete=True)) == 64
    assert torch.equal(do(tmp_path, data=iter(x.split(16)), batch_size=None)["first"][:], truth["first"])


@pytest.mark.shows("Data: data sets of Hugging Face")
def test_hugging_face_data_sets_are_data(tmp_path, truth):
    datasets = pytest.importorskip("datasets")
    x, y = jobs.data(100).tensors
    data = datasets.Dataset.from_dict({"x": x.tolist(), "label": y.tolist()})
    features = do(tmp_path / "a", data=data)
    assert torch.equal(features["first"][:], truth["first"])
    assert torch.equal(features.labels[:], y)
    features = do(tmp_path / "b", data=data.to_iterable_dataset(), batch_size=16)
    assert torch.equal(features["first"][:], truth["first"])


def test_wrong_options_are_errors(tmp_path):
    for options in (
        {"on_error": "ignore"},
        {"nan": "drop"},
        {"engine": "spark"},
        {"rows_per_shard": 0},
        {"rows_per_shard": 5, "shard_bytes": 5},
        {"engine_options": {"actors": 2}},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            do(tmp_path, **options)
