"""Every token once per epoch, bit for bit what the layer made, and a model that nobody has touched."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchhook as th
from tests.token_data import BOS, LENGTHS, MODELS, Net, by_hand, cut, gpt2, padded, rows_sorted, tokens_of
from torchhook import transforms
from torchhook.errors import ExtractError, PaddingWarning


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(20 * 7).reshape(20, 7) % 100


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# -- every token once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffer", "batch"), [(8, 8), (33, 8), (140, 32), (1000, 32), (64, 1), (50, 49)])
def test_every_token_comes_once_in_an_epoch(ids: Tensor, buffer: int, batch: int) -> None:
    model = Net()
    stream = th.stream(model, ids, "up", buffer=buffer, batch=batch, batch_size=3)
    for _ in range(2):
        found = list(stream)
        assert [len(one) for one in found[:-1]] == [batch] * (len(found) - 1)
        assert torch.equal(rows_sorted(torch.cat(found)), rows_sorted(tokens_of(model, ids)))


def test_tokens_are_shuffled_within_the_buffer_and_each_epoch_has_its_own_order(ids: Tensor) -> None:
    model = Net()
    stream = th.stream(model, ids, "up", buffer=200, batch=140, batch_size=5, seed=7)
    first, second = (torch.cat(list(stream)) for _ in range(2))
    truth = tokens_of(model, ids)
    assert not torch.equal(first, truth)
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat(list(th.stream(model, ids, "up", buffer=200, batch=140, batch_size=5, seed=7))), first)
    other = torch.cat(list(th.stream(model, ids, "up", buffer=200, batch=140, batch_size=5, seed=8)))
    assert not torch.equal(other, first)
    stream.set_epoch(0)
    assert torch.equal(torch.cat(list(stream)), first)
    assert stream.epoch == 1


def test_a_token_may_move_through_much_of_the_data() -> None:
    ids = torch.arange(4000).reshape(400, 10)
    model = nn.Sequential(nn.Identity())
    stream = th.stream(model, ids[..., None].float(), "0", buffer=1000, batch=100)
    order = torch.cat(list(stream)).flatten()
    moved = (order - torch.arange(4000)).abs()
    assert moved.mean() > 200
    assert set(order.int().tolist()) == set(range(4000))


def test_without_shuffle_tokens_come_in_the_order_of_the_data(ids: Tensor) -> None:
    model = Net()
    found = list(th.stream(model, ids, "up", buffer=30, batch=11, batch_size=4, shuffle=False))
    assert torch.equal(torch.cat(found), tokens_of(model, ids))


def test_the_last_batch_may_be_left_out(ids: Tensor) -> None:
    stream = th.stream(Net(), ids, "up", buffer=64, batch=32, drop_last=True)
    assert [len(one) for one in stream] == [32] * 4


# -- several sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_several_sites_have_the_same_token_at_the_same_place_as_alone_bit_for_bit(name: str) -> None:
    make, *sites = MODELS[name]
    model, data = make(), padded()
    options = {"buffer": 40, "batch": 16, "batch_size": 4, "seed": 5}
    both = list(th.stream(model, data, sites, **options))
    assert [list(one) for one in both] == [sites] * len(both)
    for site in sites:
        alone = list(th.stream(model, data, site, **options))
        assert all(torch.equal(one[site], other) for one, other in zip(both, alone, strict=True))
    # The oracle: bare hooks over the same batches, without the padding.
    plain = th.stream(model, data, sites, **options, shuffle=False)
    found = {site: torch.cat([one[site] for one in plain]) for site in sites}
    plain.set_epoch(0)
    truth = by_hand(model, sites, cut(data, 4))
    masks = [batch["attention_mask"].bool() for batch in cut(data, 4)]
    for site in sites:
        wanted = torch.cat([value[mask] for value, mask in zip(truth[site], masks, strict=True)])
        assert torch.equal(found[site], wanted)
    assert len(wanted) == sum(LENGTHS)


def test_sites_with_other_tokens_are_refused() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.short(self.long(x)[:, ::2])

    with pytest.raises(ExtractError, match=r"'long' has 24 tokens in a batch and 'short' 12.*Make two"):
        next(iter(th.stream(Pair(), torch.randn(4, 6, 3), ["long", "short"], buffer=8, batch=8)))


def test_a_list_or_a_glob_gives_dicts_in_the_order_of_the_sites_and_one_name_tensors(ids: Tensor) -> None:
    model = Net()
    first = next(iter(th.stream(model, ids, ["up", "table"], buffer=8, batch=8)))
    assert list(first) == ["up", "table"]
    assert list(next(iter(th.stream(model, ids, ["up"], buffer=8, batch=8)))) == ["up"]
    assert isinstance(next(iter(th.stream(model, ids, "up", buffer=8, batch=8))), Tensor)


def test_a_value_of_several_tensors_has_a_column_for_each() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, -x

    model = nn.Sequential(Two())
    batch = next(iter(th.stream(model, torch.randn(4, 6, 3), "0", buffer=8, batch=8)))
    assert list(batch) == ["0[0]", "0[1]"]
    assert torch.equal(batch["0[0]"], -batch["0[1]"])


# -- which tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drop", [[BOS], True])
def test_padding_and_special_tokens_are_left_out(side: str, drop: object) -> None:
    make, site, _ = MODELS["llama"]
    model, data = make(), padded(side)
    if drop is True:  # the configuration names no padding: it is known by the mask
        assert model.config.bos_token_id == BOS
    stream = th.stream(model, data, site, buffer=64, batch=16, batch_size=4, shuffle=False, drop_special=drop)
    truth = by_hand(model, [site], cut(data, 4))[site]
    keep = [(b["attention_mask"] == 1) & (b["input_ids"] != BOS) for b in cut(data, 4)]
    wanted = torch.cat([value[mask] for value, mask in zip(truth, keep, strict=True)])
    assert torch.equal(torch.cat(list(stream)), wanted)
    assert len(wanted) == sum(LENGTHS) - len(LENGTHS)


def test_lengths_say_what_is_padding_and_false_takes_everything() -> None:
    model = Net()
    ids, lengths = torch.randint(1, 100, (6, 5)), torch.tensor([5, 2, 3, 1, 4, 5])
    data = TensorDataset(ids, lengths)
    some = torch.cat(list(th.stream(model, data, "up", buffer=32, batch=8, shuffle=False, lengths=1)))
    wanted = tokens_of(model, ids).reshape(6, 5, 8)[torch.arange(5) < lengths[:, None]]
    assert torch.equal(some, wanted)
    make, site, _ = MODELS["gpt2"]
    everything = list(th.stream(make(), padded(), site, buffer=64, batch=16, lengths=False))
    assert sum(map(len, everything)) == padded()["input_ids"].numel()


def test_rows_that_look_padded_without_a_mask_are_warned_about() -> None:
    make, site, _ = MODELS["gpt2"]
    with pytest.warns(PaddingWarning, match="look padded, and no mask is known"):
        list(th.stream(make(), {"input_ids": padded()["input_ids"]}, site, buffer=64, batch=16))


def test_a_model_that_lets_padding_in_is_warned_about() -> None:
    with pytest.warns(PaddingWarning, match="lets padding in"):  # absolute positions, and padding on the left
        list(th.stream(gpt2(), padded("left"), "transformer.h.0", buffer=64, batch=16))


def test_special_tokens_need_ids_and_say_so() -> None:
    with pytest.raises(ExtractError, match="names no special tokens"):
        th.stream(Net(), torch.zeros(2, 3, dtype=torch.long), "up", drop_special=True)
    with pytest.raises(ExtractError, match="needs the token ids of 4 rows of 6 positions, found none"):
        next(iter(th.stream(nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 6, 3), "0", drop_special=[1])))


def test_a_transform_changes_what_is_kept_and_one_token_of_a_row_is_a_token() -> None:
    make, site, _ = MODELS["llama"]
    model, data = make(), padded("right")
    last = th.stream(
        model, data, site, buffer=32, batch=8, batch_size=4, shuffle=False, transform=transforms.tokens("last")
    )
    truth = torch.cat(by_hand(model, [site], cut(data, 4))[site])
    wanted = torch.stack([truth[i, n - 1] for i, n in enumerate(LENGTHS)])
    assert torch.equal(torch.cat(list(last)), wanted)
    half = th.stream(model, data, site, buffer=64, batch=16, transform=transforms.narrow(0, 3), batch_size=4)
    assert sum(map(len, half)) == sum(min(3, n) for n in LENGTHS)


def test_maps_are_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    images = torch.randn(4, 3, 5, 5)
    with pytest.raises(ExtractError, match=r"no rows of tokens \(N, T, D\)"):
        next(iter(th.stream(model, images, "0", buffer=8, batch=8)))
    pixels = th.stream(model, images, "0", buffer=99, batch=50, transform=lambda v: v.flatten(2).transpose(1, 2))
    assert [one.shape for one in pixels] == [(50, 4), (50, 4)]


# -- the model is left alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["end", "break", "close", "collect", "raise in the loop", "raise in the model"])
def test_the_model_is_as_it_was_while_a_batch_is_used_and_afterwards(ids: Tensor, way: str) -> None:
    model = Net().train()
    model.drop.eval()
    before = {name: part.clone() for name, part in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    numbers = torch.get_rng_state()

    def check() -> None:
        assert hooks(model) == 0
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.get_rng_state(), numbers)

    batches = iter(th.stream(model, ids, "up", buffer=16, batch=8, batch_size=2))
    if way == "raise in the model":
        next(batches)
        model.up.weight.data = model.up.weight.data[:, :3]
        with pytest.raises(RuntimeError):
            list(batches)
        model.up.weight.data = before["up.weight"].clone()
        check()
        return
    with contextlib.suppress(KeyError):
        for i, batch in enumerate(batches):
            assert not batch.requires_grad
            check()
            if way == "raise in the loop" and i == 3:
                raise KeyError
            if way in ("break", "close", "collect") and i == 2:
                break
    if way == "close":
        batches.close()
    if way == "collect":
        del batches
        gc.collect()
    check()


def test_the_model_may_be_used_and_trained_between_batches(ids: Tensor) -> None:
    model = Net().train()
    frozen = tokens_of(model, ids)
    decoder = nn.Linear(8, 8)
    seen = []
    for batch in th.stream(model, ids, "up", buffer=24, batch=8, batch_size=2):
        decoder(batch).sum().backward()  # on the graph of the one who trains
        model(ids[:2])  # in training mode
        seen.append(batch)
    assert torch.equal(rows_sorted(torch.cat(seen)), rows_sorted(frozen))
    assert decoder.weight.grad is not None


def test_values_are_those_that_the_layer_made_though_the_next_one_writes_to_them(ids: Tensor) -> None:
    model = Net()
    found = torch.cat(list(th.stream(model, ids, "up", buffer=500, batch=500)))
    assert (found < 0).any()  # the in-place relu comes after it


def test_the_model_stops_at_the_last_site_and_runs_no_more_than_the_batches_need(ids: Tensor) -> None:
    model = Net()
    seen, calls = [], []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    batches = iter(th.stream(model, ids, "up", buffer=14, batch=7, batch_size=1))
    next(batches)
    assert len(calls) == 2  # two rows of seven fill the buffer
    list(batches)
    assert len(seen) == 1  # the first batch, which runs whole


def test_two_streams_over_one_model_do_not_mix(ids: Tensor) -> None:
    model = Net()
    one, two = (th.stream(model, ids, site, buffer=32, batch=8, batch_size=2) for site in ("up", "table"))
    pairs = list(zip(one, two, strict=True))
    assert torch.equal(rows_sorted(torch.cat([a for a, _ in pairs])), rows_sorted(tokens_of(model, ids)))
    assert all(b.shape[1] == 6 for _, b in pairs)


# -- refused ---------------------------------------------------------------------------------------------------


def test_bad_options_are_refused_at_once(ids: Tensor) -> None:
    for options, message in (
        ({"buffer": 8, "batch": 9}, "buffer=8: it must hold one batch at least"),
        ({"batch": 0}, "batch=0: give a number of tokens"),
        ({"buffer": 1.5}, "buffer=1.5: give a number of tokens"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            th.stream(Net(), ids, "up", **options)


def test_data_without_rows_a_site_that_runs_twice_and_one_that_changes_are_refused(ids: Tensor) -> None:
    with pytest.raises(ExtractError, match="the data has no rows"):
        list(th.stream(Net(), ids[:0], "up"))
    shared = nn.Linear(4, 4)
    with pytest.raises(ExtractError, match="runs more than once in one forward pass"):
        list(th.stream(nn.Sequential(shared, shared), torch.randn(4, 6, 4), "0"))
    batches = iter([torch.randn(2, 3, 4), torch.randn(2, 3, 5)])
    with pytest.raises(ExtractError, match=r"\(4,\) on cpu at first, of torch.float32 \(5,\)"):
        list(th.stream(nn.Sequential(nn.Identity()), batches, "0"))


def test_the_stream_prints_what_it_is(ids: Tensor) -> None:
    stream = th.stream(Net(), ids, ["up", "table"], buffer=32, batch=8)
    assert repr(stream) == "<tokens of up, table: batches of 8 out of 32, epoch 0 comes next>"
    list(itertools.islice(stream, 1))
    assert stream.epoch == 1


def test_a_length_that_is_one_number_is_told_what_numbers_mean() -> None:
    ids = {"input": torch.ones(4, 3, dtype=torch.long)}
    with pytest.raises(ExtractError, match=r"lengths=4: a number is the place of a field .* one value for every row"):
        next(iter(th.stream(nn.Embedding(9, 3), ids, "(model)", lengths=4)))
