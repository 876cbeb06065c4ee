"""``extract(drop_special=)``: rows of the tokens that are neither special nor padding, as a stream takes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_bert, small_gpt2, small_llama, small_t5
from torchhook import transforms as tf
from torchhook.errors import DataWarning, ExtractError, PaddingWarning, StoreMismatchError, TransformError

BOS, EOS, PAD = 1, 2, 0


def data(rows: int = 8, width: int = 9, side: str = "right") -> dict[str, Tensor]:
    """Rows that begin with 1 and end with 2, with a 2 somewhere between in some of them, and padding."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 50, (rows, width), generator=generator)
    lengths = torch.randint(4, width + 1, (rows,), generator=generator)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    ids[:, 0] = BOS
    ids[torch.arange(rows), lengths - 1] = EOS
    ids[::3, 2] = EOS
    ids = ids * mask
    if side == "left":
        ids = torch.stack([row.roll(width - int(length)) for row, length in zip(ids, lengths, strict=True)])
        mask = ids != PAD
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}


def seen(model: nn.Module, path: str, call: dict[str, Tensor]) -> Tensor:
    """What a module gives, by a bare hook."""
    found: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model(**call)
    handle.remove()
    return (found[0] if isinstance(found[0], Tensor) else found[0][0]).clone()


def extract(model: nn.Module, rows: Any, sites: Any, out: Path, **options: Any) -> Any:
    options = {"batch_size": 3, "progress": False, "labels": False} | options
    return th.extract(model, rows, sites, out, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_the_store_has_the_tokens_of_the_stream(tmp_path: Path, make: Any, side: str) -> None:
    model, _ = make()
    rows = data(side=side)
    site = "transformer.h.1.mlp" if make is small_gpt2 else "model.layers.1.mlp"
    wanted = (rows["attention_mask"] == 1) & ~torch.isin(rows["input_ids"], torch.tensor([BOS, EOS]))
    whole = seen(model, site, rows)
    features = extract(model, rows, [site, "@v.0"], tmp_path, drop_special=True)
    for row, expected, kept in zip(features[site][:], whole, wanted, strict=True):
        torch.testing.assert_close(row, expected[kept])
    tokens = features.tokens(site, "@v.0")
    (streamed,) = list(
        th.stream(model, rows, [site, "@v.0"], drop_special=True, shuffle=False, batch=999, buffer=999, batch_size=3)
    )
    torch.testing.assert_close(tokens[:][site], streamed[site])
    torch.testing.assert_close(tokens[:]["@v.0"].flatten(1), streamed["@v.0"])
    assert len(tokens) == int(wanted.sum())
    assert tokens.where(slice(None)).rows.tolist() == wanted.nonzero()[:, 0].tolist()


def test_ids_may_be_given_and_padding_said_otherwise(tmp_path: Path) -> None:
    model, _ = small_bert()
    rows = data()
    mask, ids = rows["attention_mask"].bool(), rows["input_ids"]
    call = {"input_ids": ids, "attention_mask": rows["attention_mask"]}
    whole = seen(model, "encoder.layer.1", call)
    for name, options, wanted in (
        ("some", {"drop_special": [BOS, 7]}, mask & ~torch.isin(ids, torch.tensor([BOS, 7]))),
        ("all positions", {"drop_special": [BOS], "lengths": False}, ids != BOS),
        ("with lengths", {"drop_special": [BOS], "lengths": mask.sum(1).tolist()}, mask & (ids != BOS)),
    ):
        found = extract(model, call, "encoder.layer.1", tmp_path / name, **options)["encoder.layer.1"][:]
        for row, expected, kept in zip(found, whole, wanted, strict=True):
            torch.testing.assert_close(row, expected[kept])


def test_what_the_model_makes_of_all_tokens_of_a_row_stays(tmp_path: Path) -> None:
    model, _ = small_bert()
    rows = data()
    call = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    sites = ["pooler", "encoder.layer.0", "encoder.layer.0.attention.self"]
    transform = {"encoder.layer.0": tf.pool("mean")}
    features = extract(model, call, sites, tmp_path, drop_special=[BOS], transform=transform)
    torch.testing.assert_close(features["pooler"][:], seen(model, "pooler", call))
    kept = rows["attention_mask"].bool() & (rows["input_ids"] != BOS)
    means = [row[left].mean(0) for row, left in zip(seen(model, "encoder.layer.0", call), kept, strict=True)]
    torch.testing.assert_close(features["encoder.layer.0"][:], torch.stack(means))
    whole = seen(model, "encoder.layer.0.attention.self", call)  # the first of a tuple
    for row, expected, chosen in zip(features["encoder.layer.0.attention.self[0]"][:], whole, kept, strict=True):
        torch.testing.assert_close(row, expected[chosen])


def test_a_run_goes_on_with_the_same_tokens_only(tmp_path: Path) -> None:
    model, _ = small_llama()
    rows = data()
    options: dict[str, Any] = {"rows_per_shard": 3, "drop_special": [EOS, BOS]}
    first = extract(model, rows, "@embed", tmp_path, **options)
    before = first["@embed"][:]
    next(tmp_path.glob("shards/*1.safetensors")).unlink()
    again = extract(model, rows, "@embed", tmp_path, **options | {"drop_special": [BOS, EOS]})
    for one, other in zip(before, again["@embed"][:], strict=True):
        assert torch.equal(one, other)
    for drop in (False, [BOS]):
        with pytest.raises(StoreMismatchError, match="lengths"):
            extract(model, rows, "@embed", tmp_path, **options | {"drop_special": drop})


def test_a_decoder_has_its_own_ids_by_whatever_name(tmp_path: Path) -> None:
    """As long as the encoder's, so that only the site tells which are meant."""
    model, _ = small_t5()
    ids = torch.tensor([[5, 1, 6, 2], [1, 7, 8, 2]])
    decoder = torch.tensor([[0, 5, 6, 1], [0, 1, 1, 9]])
    call = {"input_ids": ids, "decoder_input_ids": decoder}
    sites = ["@decoder.resid_post.0", "@encoder.resid_post.0", "@decoder.v.1"]
    features = extract(model, call, sites, tmp_path, drop_special=[1])
    for site, of in zip(sites, (decoder, ids, decoder), strict=True):
        assert [len(row) for row in features[site][:]] == (of != 1).sum(1).tolist()
        (tokens,) = list(th.stream(model, call, site, drop_special=[1], shuffle=False, batch=99, buffer=99))
        torch.testing.assert_close(torch.cat(list(features[site][:])).flatten(1), tokens)
    torch.testing.assert_close(features[sites[0]][0], seen(model, "decoder.block.0", call)[0, :3])


def test_a_row_of_special_tokens_alone_is_empty(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, 6, EOS], [BOS, EOS, EOS, EOS], [BOS, 7, EOS, PAD]])
    call = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    features = extract(model, call, ["@embed", "@k.0"], tmp_path, drop_special=True)
    assert [len(row) for row in features["@embed"][:]] == [len(row) for row in features["@k.0"][:]] == [2, 0, 1]
    assert features.tokens("@embed", "@k.0").where(slice(None)).rows.tolist() == [0, 0, 2]


def test_rows_of_a_transforms_own_making_are_refused(tmp_path: Path) -> None:
    model, _ = small_llama()
    with pytest.raises(ExtractError, match="no token ids to drop by"):
        extract(model, data(), "@embed", tmp_path, drop_special=True, transform=lambda value: tf.Rows(value.unbind()))


def test_who_has_no_token_ids_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ExtractError, match="drop_special= needs the token ids"):
        extract(model, torch.randn(4, 5, 4), "(model)", tmp_path, drop_special=[1])


# -- masks with holes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("told", [True, False])
def test_a_mask_that_leaves_special_tokens_out_is_no_padding(tmp_path: Path, told: bool, side: str) -> None:
    """The row that is tried alone keeps its first token, without which a causal model says something else."""
    model, _ = small_llama()
    rows = data(side=side)
    ids, mask = rows["input_ids"], rows["attention_mask"].bool()
    whole = seen(model, "model.layers.1", rows if told else {"input_ids": ids})
    kept = mask & ~torch.isin(ids, torch.tensor([BOS, EOS]))
    call = rows if told else {"input_ids": ids}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PaddingWarning)
        found = extract(model, call | {"kept": kept}, "model.layers.1", tmp_path, lengths="kept")["model.layers.1"][:]
    for row, expected, chosen in zip(found, whole, kept, strict=True):
        torch.testing.assert_close(row, expected[chosen])


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_made_of_a_mask_with_holes_is_no_padding_either(tmp_path: Path, side: str) -> None:
    model, _ = small_llama()
    rows = data(side=side)
    kept = rows["attention_mask"].bool() & ~torch.isin(rows["input_ids"], torch.tensor([BOS, EOS]))
    options: dict[str, Any] = {"lengths": "kept", "transform": tf.pool("mean")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PaddingWarning)
        found = extract(model, rows | {"kept": kept}, "model.layers.1", tmp_path, **options)["model.layers.1"][:]
    whole = seen(model, "model.layers.1", rows)
    means = [row[left].mean(0) for row, left in zip(whole, kept, strict=True)]
    torch.testing.assert_close(found, torch.stack(means))


@pytest.mark.parametrize("how", ["mask", "special"])
def test_padding_that_a_model_lets_in_is_told_all_the_same(tmp_path: Path, how: str) -> None:
    """Padded on the left, without positions: row and padded row differ."""
    model, _ = small_gpt2()
    rows = data(side="left")
    call = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    kept = rows["attention_mask"].bool() & ~torch.isin(rows["input_ids"], torch.tensor([BOS, EOS]))
    options: dict[str, Any] = {"lengths": "kept"} if how == "mask" else {"drop_special": True}
    with pytest.warns(PaddingWarning, match="alone and unpadded than in its padded batch"):
        extract(model, call | ({"kept": kept} if how == "mask" else {}), "transformer.h.1", tmp_path, **options)


def test_dropping_every_token_is_told(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, EOS], [BOS, 6, EOS]])
    with pytest.warns(DataWarning, match=r"'@embed': no row has a token .* drop_special="):
        features = extract(model, {"input_ids": ids}, "@embed", tmp_path, drop_special=range(9))
    assert [len(row) for row in features["@embed"][:]] == [0, 0]
    with pytest.raises(ExtractError, match=r"@embed: the data has no token .* drop_special="):
        list(th.stream(model, {"input_ids": ids}, "@embed", drop_special=range(9)))
    with pytest.raises(ExtractError, match="neither padding nor special"):
        th.statistics(model, {"input_ids": ids}, "@embed", drop_special=range(9))


def test_no_special_ids_leave_out_padding_alone(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, EOS], [BOS, EOS, PAD]])
    call = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    for name, drop in (("none", []), ("no such", [-1])):
        features = extract(model, call, "@embed", tmp_path / name, drop_special=drop)
        assert [len(row) for row in features["@embed"][:]] == [3, 2]
    assert extract(model, call, "@embed", tmp_path / "whole")["@embed"].shape == (2, 3, model.config.hidden_size)


def test_wrong_arguments_are_refused_by_all_three(tmp_path: Path) -> None:
    model, _ = small_llama()
    wrong = pytest.raises(TypeError, match=r"^drop_special='<s>': expected a list of token ids")
    with wrong:
        extract(model, data(), "@embed", tmp_path, drop_special="<s>")
    with wrong:
        th.stream(model, data(), "@embed", drop_special="<s>")  # type: ignore[arg-type]
    with wrong:
        th.statistics(model, data(), "@embed", drop_special="<s>")  # type: ignore[arg-type]


# -- transforms that reduce tokens ---------------------------------------------------------------------------------

REDUCED: dict[str, tuple[Any, Any]] = {
    "mean": (tf.pool("mean"), lambda row: row.mean(0)),
    "max": (tf.pool("max"), lambda row: row.amax(0)),
    "first": (tf.tokens(0), lambda row: row[0]),
    "last": (tf.tokens("last"), lambda row: row[-1]),
    "ends": (tf.tokens([0, -1]), lambda row: row[[0, -1]]),
    "only": (tf.only(positions=0), lambda row: row[:1]),
    "composed": (tf.compose(lambda value: value * 2, tf.pool("sum")), lambda row: row.sum(0) * 2),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("how", REDUCED)
def test_a_transform_sees_the_tokens_that_are_left(tmp_path: Path, how: str, side: str) -> None:
    """In a store, a stream and statistics; and no warning that the row alone would have other features."""
    model, _ = small_llama()
    rows, site = data(side=side), "model.layers.1"
    transform, alone = REDUCED[how]
    kept = rows["attention_mask"].bool() & ~torch.isin(rows["input_ids"], torch.tensor([BOS, EOS]))
    wanted = torch.stack([alone(row[left]) for row, left in zip(seen(model, site, rows), kept, strict=True)])
    options: dict[str, Any] = {"transform": transform, "drop_special": [BOS, EOS], "batch_size": 3}
    torch.testing.assert_close(extract(model, rows, site, tmp_path, **options)[site][:], wanted)
    tokens = wanted.reshape(-1, wanted.shape[-1])
    streamed = torch.cat(list(th.stream(model, rows, site, shuffle=False, buffer=99, batch=99, **options)))
    torch.testing.assert_close(streamed, tokens)
    found = th.statistics(model, rows, site, **options)[site]
    assert found.count == len(tokens)
    torch.testing.assert_close(found.mean, tokens.double().mean(0), rtol=1e-5, atol=1e-6)


def test_heads_before_tokens_are_reduced_without_special_tokens_too(tmp_path: Path) -> None:
    model, _ = small_llama()
    rows = data()
    kept = rows["attention_mask"].bool() & (rows["input_ids"] != BOS)
    whole = seen(model, "model.layers.1.self_attn.v_proj", rows)  # (N, T, heads * D)
    wanted = torch.stack([row[left].mean(0) for row, left in zip(whole, kept, strict=True)])
    found = extract(model, rows, "@v.1", tmp_path, transform=tf.pool("mean"), drop_special=[BOS])["@v.1"][:]
    heads = wanted.unflatten(1, (-1, model.config.hidden_size // model.config.num_attention_heads))
    times = found.shape[1] // heads.shape[1]  # as the kernel wants them
    torch.testing.assert_close(found, heads.repeat_interleave(times, 1))


def test_lengths_beside_special_tokens_change_nothing_of_heads_and_of_several_values(tmp_path: Path) -> None:
    model, _ = small_llama()
    rows = data()
    sites = ["@k.1", "model.layers.1.self_attn"]
    alone = extract(model, rows, sites, tmp_path / "a", drop_special=[BOS])
    beside = extract(model, rows, sites, tmp_path / "b", drop_special=[BOS], lengths="attention_mask")
    assert alone.keys() == beside.keys()
    for site in ("@k.1", "model.layers.1.self_attn[0]"):
        for one, other in zip(alone[site][:], beside[site][:], strict=True):
            assert torch.equal(one, other)
    options: dict[str, Any] = {"shuffle": False, "buffer": 99, "batch": 99, "batch_size": 3}
    tokens = torch.cat(list(alone["@k.1"][:])).flatten(1)
    for more in ({"drop_special": [BOS], "lengths": "attention_mask"}, {"drop_special": [BOS]}):
        (streamed,) = list(th.stream(model, rows, "@k.1", **options, **more))
        assert torch.equal(streamed, tokens)


def test_a_slice_is_of_the_tokens_that_are_left(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 8, 9, EOS, PAD]])
    call = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    options: dict[str, Any] = {"drop_special": [BOS, EOS], "progress": False}
    found = extract(model, call, "@embed", tmp_path / "a", transform=tf.narrow(1, None), **options)["@embed"][:]
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(torch.cat(list(found)), table[[6, 7, 9]].detach())
    with pytest.raises(ExtractError, match="narrow has cut off positions"):
        extract(model, call, "@embed", tmp_path / "b", transform=tf.narrow(0, 2), **options)


@pytest.mark.parametrize(
    "transform",
    [
        lambda value: value.mean(1),
        lambda value: value.norm(dim=-1),
        lambda value: value[:, :1],
        lambda value: value[:, 1:],
        tf.compose(lambda value: value.sum(1), tf.cast(torch.float64)),
    ],
)
def test_a_function_that_was_told_of_no_tokens_is_refused(tmp_path: Path, transform: Any) -> None:
    """It took special tokens in, and nobody could know."""
    model, _ = small_llama()
    options: dict[str, Any] = {"transform": transform, "drop_special": [BOS]}
    refused = pytest.raises(ExtractError, match=r"'@embed': drop_special= .* transforms\.pool")
    with refused:
        extract(model, data(), "@embed", tmp_path, **options)
    with refused:
        list(th.stream(model, data(), "@embed", **options))
    with refused:
        th.statistics(model, data(), "@embed", **options)


def test_functions_of_each_token_and_of_what_has_none_are_not(tmp_path: Path) -> None:
    model, _ = small_bert()
    rows = data()
    call = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    transform = {"pooler": lambda value: value[:, :2], "(model)": tf.pick("pooler_output"), "embeddings": abs}
    features = extract(model, call, list(transform), tmp_path, transform=transform, drop_special=[BOS])
    torch.testing.assert_close(features["pooler"][:], seen(model, "pooler", call)[:, :2])
    torch.testing.assert_close(features["(model)"][:], seen(model, "pooler", call))
    left = rows["attention_mask"].bool() & (rows["input_ids"] != BOS)
    torch.testing.assert_close(torch.cat(list(features["embeddings"][:])), seen(model, "embeddings", call)[left].abs())


def test_a_row_without_a_token_has_no_mean(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, EOS], [BOS, EOS, EOS]])
    with pytest.raises(TransformError, match="'@embed': row 1 of the batch has no token that is neither"):
        extract(model, {"input_ids": ids}, "@embed", tmp_path, drop_special=True, transform=tf.pool("mean"))


def test_all_positions_of_one_site_can_be_asked_for(tmp_path: Path) -> None:
    model, _ = small_llama()
    ids = torch.tensor([[BOS, 5, 6, EOS], [BOS, 8, 9, EOS]])
    transform = tf.pool("mean", masked=False)
    found = extract(model, {"input_ids": ids}, "@embed", tmp_path, drop_special=True, transform=transform)["@embed"][:]
    torch.testing.assert_close(found, model.get_input_embeddings().weight[ids].mean(1).detach())


# -- which tensor are the ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["position_ids"], ["token_type_ids"]])
def test_neither_masks_nor_positions_are_token_ids(tmp_path: Path, more: list[str]) -> None:
    model, _ = small_gpt2()
    rows = data()
    call = {"inputs_embeds": torch.randn(8, 9, model.config.n_embd), "attention_mask": rows["attention_mask"]}
    call |= dict.fromkeys(more, rows["position_ids"])
    needs = pytest.raises(ExtractError, match="drop_special= needs the token ids")
    with needs:
        extract(model, call, "transformer.h.0", tmp_path, drop_special=[1])
    with needs:
        list(th.stream(model, call, "transformer.h.0", drop_special=[1]))
    with needs:
        extract(model, call, "transformer.h.0", tmp_path, drop_special=[1], transform=tf.pool("mean"))


def test_a_decoder_whose_ids_are_made_inside_is_refused(tmp_path: Path) -> None:
    """Of labels: those of the encoder, which are as long, are others."""
    model, _ = small_t5()
    ids = torch.tensor([[5, 1, 6, 2], [1, 7, 8, 2]])
    options: dict[str, Any] = {"drop_special": [1], "input_fn": lambda ids: {"input_ids": ids, "labels": ids.flip(1)}}
    found = extract(model, ids, "@encoder.resid_post.0", tmp_path / "a", **options)
    assert [len(row) for row in found["@encoder.resid_post.0"]] == [3, 3]
    for site in ("@decoder.resid_post.0", "lm_head"):
        with pytest.raises(ExtractError, match="drop_special= needs the token ids"):
            extract(model, ids, site, tmp_path / "b", **options)
    both = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    with pytest.raises(ExtractError, match="both fit the value, and differ"):
        extract(model, both, "lm_head", tmp_path / "b", drop_special=[1])
