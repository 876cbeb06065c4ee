"""Statistics of stored features are those of the model's own values, whatever a row is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_llama
from torchhook import transforms
from torchhook.errors import ExtractError
from torchhook.types import SiteStatistics

# No two rows begin with the same token: its values would be the largest of both.
IDS = torch.tensor([[1, 11, 12, 13, 2, 0], [41, 21, 22, 2, 0, 0], [42, 31, 1, 33, 34, 2], [43, 9, 8, 7, 6, 2]])
PADDED = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
WHOLE = {"input_ids": IDS[2:], "attention_mask": torch.ones(2, 6, dtype=torch.long)}


def projected(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    """What the values of an attention are made of, heads side by side: by a bare hook."""
    found: list[Tensor] = []
    module = model.get_submodule("model.layers.1.self_attn.v_proj")
    handle = module.register_forward_hook(lambda module, args, output: found.append(output.clone()))
    with torch.no_grad():
        model(**call)
    handle.remove()
    return found[0].double()


def same(found: Any, rows: list[Tensor], top: int) -> None:
    flat = torch.cat(rows)
    assert found.count == len(flat)
    torch.testing.assert_close(found.mean, flat.mean(0))
    torch.testing.assert_close(found.std, flat.std(0))
    torch.testing.assert_close(found.max, flat.amax(0))
    best = torch.stack([row.amax(0) for row in rows]).topk(top, dim=0)
    assert torch.equal(found.top_rows, best.indices.T)
    for channel, numbers in enumerate(found.top_rows.tolist()):
        places = [int(rows[row][:, channel].argmax()) for row in numbers]
        assert found.top_positions[channel].tolist() == places


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (WHOLE, {"lengths": "attention_mask"}),
        (PADDED, {"lengths": "attention_mask"}),
        (PADDED, {"drop_special": [1, 2]}),
    ],
)
def test_tokens_of_several_heads_are_the_channels_of_the_model_itself(
    tmp_path: Path, call: dict[str, Tensor], options: dict[str, Any]
) -> None:
    model, _ = small_llama()
    kept = call["attention_mask"].bool()
    if "drop_special" in options:
        kept = kept & (call["input_ids"] > 2)
    rows = [row[left] for row, left in zip(projected(model, call), kept, strict=True)]
    store = th.extract(model, call, "@v.1", tmp_path, progress=False, batch_size=3, **options)
    assert store["@v.1"].spec.ragged
    same(store.statistics("@v.1", top=2), rows, 2)
    same(th.statistics(model, call, "@v.1", top=2, batch_size=3, **options)["@v.1"], rows, 2)


def test_heads_of_a_token_can_be_taken_for_themselves(tmp_path: Path) -> None:
    model, _ = small_llama()
    store = th.extract(model, PADDED, "@v.1", tmp_path, progress=False, lengths="attention_mask")
    heads = store["@v.1"].spec.shape[0]
    flat = projected(model, PADDED)[PADDED["attention_mask"].bool()].unflatten(1, (heads, -1))
    found = store.statistics("@v.1", channel=-1, top=1)
    torch.testing.assert_close(found.mean, flat.mean((0, 1)))
    assert found.count == flat[..., 0].numel()
    assert int(found.top_positions.max()) < 6
    torch.testing.assert_close(store.statistics("@v.1", channel=1).mean, flat.mean((0, 2)))
    for channel in (0, -3, 3):
        with pytest.raises(ValueError, match=f"channel={channel}: a row has the shape"):
            store.statistics("@v.1", channel=channel)


def test_heads_before_tokens_are_no_maps(tmp_path: Path) -> None:
    model, _ = small_llama()
    store = th.extract(model, WHOLE, ["@v.1", "@resid_post.1"], tmp_path, progress=False)
    with pytest.raises(ExtractError, match=r"'@v.1': .*heads.*lengths="):
        store.statistics("@v.1")
    with pytest.raises(TypeError, match=r"'@v.1': .*lengths="):
        store.tokens("@v.1")
    assert store.statistics("@v.1", channel=-1).mean.shape == (store["@v.1"].spec.shape[-1],)
    assert store.statistics("@resid_post.1").count == 12


def test_a_map_beside_a_wrong_channel(tmp_path: Path) -> None:
    maps = torch.randn(4, 3, 5, 6)
    store = th.extract(nn.Sequential(nn.Identity()), maps, "0", tmp_path, progress=False)
    torch.testing.assert_close(store.statistics("0").mean, maps.double().mean((0, 2, 3)))
    with pytest.raises(ValueError, match="channel=3: a row has the shape"):
        store.statistics("0", channel=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": -1}, "^top=-1: "),
        ({"resolution": 1, "quantiles": [0.5]}, "^resolution=1: "),
        ({"quantiles": [1.5]}, r"^quantiles=\[1.5\]: "),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    store = th.extract(nn.Sequential(nn.Identity()), torch.randn(4, 3), "0", tmp_path, progress=False)
    with pytest.raises(ValueError, match=message):
        store.statistics("0", **options)
    with pytest.raises(ValueError, match=message):
        th.statistics(nn.Sequential(nn.Identity()), torch.randn(4, 3), "0", **options)


def test_rows_of_numbers_have_one_channel(tmp_path: Path) -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    store = th.extract(
        nn.Sequential(nn.Identity()),
        torch.zeros(2, 1),
        "0",
        tmp_path,
        transform=lambda value: transforms.Rows(rows),
        progress=False,
    )
    found = store.statistics("0", top=1)
    assert (found.mean.tolist(), found.top_rows.tolist(), found.top_positions.tolist()) == ([2.0], [[1]], [[0]])


def test_a_store_gives_what_is_given_of_a_model(tmp_path: Path) -> None:
    """The same class, with every number that it can tell: all computed by hand here."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    store = th.extract(nn.Sequential(nn.Identity()), x, "0", tmp_path, progress=False)
    found = store.statistics("0", covariance=True, quantiles=[0.5], top=2)
    assert isinstance(found, SiteStatistics)
    assert repr(found) == "<statistics of 50 values, 3 numbers of each kind>"
    y = x.double()
    best = y.topk(2, dim=0)
    assert found.count == 50
    assert found.rank_error == 0
    for one, other in [
        (found.mean, y.mean(0)),
        (found.variance, y.var(0)),
        (found.std, y.std(0)),
        (found.kurtosis, (y - y.mean(0)).pow(4).mean(0) / y.var(0, unbiased=False).square()),
        (found.covariance, y.T.cov()),
        (found.quantiles[0.5], y.quantile(0.5, dim=0)),
        (found.quantile(0.25), y.quantile(0.25, dim=0)),
        (found.top_values, best.values.T),
    ]:
        torch.testing.assert_close(one, other, check_dtype=False)
    assert torch.equal(found.min, x.amin(0))
    assert torch.equal(found.max, x.amax(0))
    assert torch.equal(found.absmax, x.abs().amax(0))
    assert torch.equal(found.top_rows, best.indices.T)
    assert found.top_positions.unique().tolist() == [0]
    plain = store.statistics("0")
    assert (plain.covariance, plain.quantiles, plain.top_rows, plain.top_values) == (None, {}, None, None)
    with pytest.raises(ValueError, match="no quantiles are known: say quantiles="):
        plain.quantile(0.5)


def test_one_share_in_place_of_several_is_told(tmp_path: Path) -> None:
    store = th.extract(nn.Sequential(nn.Identity()), torch.randn(4, 3), "0", tmp_path, progress=False)
    for take in (store.statistics, lambda site, **o: th.statistics(nn.Identity(), torch.randn(4, 3), "(model)", **o)):
        with pytest.raises(TypeError, match=r"quantiles=0\.5: give a list of shares, quantiles=\[0\.5\]"):
            take("0", quantiles=0.5)
