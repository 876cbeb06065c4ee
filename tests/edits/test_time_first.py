"""Values with tokens before rows, ``(T, N, D)``, or with streams before both: what positions and rows mean there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import from_config, made
from torchhook import edits
from torchhook import transforms as tf
from torchhook.errors import EditError

ROWS, TOKENS = 2, 5
IDS = torch.arange(3, 3 + ROWS * TOKENS).reshape(ROWS, TOKENS)


class TimeFirst(nn.Module):
    """Ids (N, T) inside of which tokens come first, and a state of each layer, (3, N, D), beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.state = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.embed(ids).transpose(0, 1))
        self.state(x[:1].expand(3, -1, -1))
        return x.transpose(0, 1)  # type: ignore[no-any-return]


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({"positions": -1}, (slice(None), -1)),
    ({"positions": [0, 2]}, (slice(None), [0, 2])),
    ({"rows": 1}, 1),
    ({"rows": 0, "positions": slice(1, 3)}, (0, slice(1, 3))),
    ({"positions": [[1], [4]]}, ([0, 1], [1, 4])),
    ({"positions": IDS % 3 == 0}, IDS % 3 == 0),
]
IDENTIFIED = [str(choice) for choice, _ in CHOICES]


@pytest.mark.parametrize(("choice", "index"), CHOICES, ids=IDENTIFIED)
def test_rows_and_positions_are_those_of_the_call(choice: dict[str, Any], index: Any) -> None:
    model = TimeFirst()
    expected = model(IDS).detach().clone()
    expected[index] = expected[index] * 3
    with torch.no_grad(), th.edit(model, {"inner": edits.only(edits.scale(3), **choice)}):
        assert torch.equal(model(IDS), expected)


def test_an_edit_sees_the_dims_of_the_value_and_tensors_of_the_whole_fit() -> None:
    model, seen, whole = TimeFirst(), list[Tensor](), torch.randn(TOKENS, ROWS, 8)
    before = model(IDS).detach()
    with torch.no_grad(), th.edit(model, {"inner": edits.only([seen.append, edits.replace(whole)], positions=-1)}):
        found = model(IDS)
    assert seen[0].shape == (1, ROWS, 8)
    assert torch.equal(found[:, -1], whole[-1])
    assert torch.equal(found[:, :-1], before[:, :-1])
    with th.capture(model, "inner") as other:
        model(IDS.flip(0))
    with torch.no_grad(), th.edit(model, {"inner": edits.patch(other, positions=[1])}):
        patched = model(IDS)
    before[:, 1] = before.flip(0)[:, 1]
    torch.testing.assert_close(patched, before)


def test_what_is_neither_rows_nor_tokens_first_is_refused_and_can_be_named() -> None:
    model = TimeFirst()
    for choice in ({"rows": 1}, {"positions": 1}):
        with th.edit(model, {"state": edits.only(edits.zero(), **choice)}):
            with pytest.raises(EditError, match=r"state#0: .*\(3, 2, 8\).*called with 2.*edits\.along"):
                model(IDS)
    with th.capture(model, "state", edit={"state": edits.only(edits.zero(), rows=edits.along(1, dim=1))}) as rec:
        model(IDS)
    assert rec["state"][:, 1].eq(0).all()
    assert rec["state"][:, 0].ne(0).all()


def test_where_rows_and_tokens_are_as_many_dim_0_is_the_rows() -> None:
    ids = torch.arange(9).reshape(3, 3)
    with (
        torch.no_grad(),
        th.capture(model := TimeFirst(), "inner", edit={"inner": edits.only(lambda x: x * 0, 1)}) as rec,
    ):
        model(ids)
    assert rec["inner"][:, 1].eq(0).all()  # as ever: nothing tells


def test_what_is_kept_has_rows_first() -> None:
    model = TimeFirst()
    whole = model(IDS).detach()
    wanted: list[tuple[Any, Tensor]] = [
        (tf.tokens("last"), whole[:, -1]),
        (tf.tokens([0, 2]), whole[:, [0, 2]]),
        (tf.pool("mean"), whole.mean(1)),
        (tf.only(positions=[0, -1]), whole[:, [0, -1]]),
        (tf.only(rows=1), whole[1:]),
        (tf.compose(tf.only(rows=1), tf.pool("sum")), whole[1:].sum(1)),
        (tf.compose(tf.tokens([0, 2]), tf.only(positions=1)), whole[:, [2]]),
    ]
    for transform, expected in wanted:
        with torch.no_grad(), th.capture(model, "inner", transform=transform) as rec:
            model(IDS)
        torch.testing.assert_close(rec["inner"], expected, msg=repr(transform))


def test_positions_are_counted_without_padding() -> None:
    class Masked(TimeFirst):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    model, mask = Masked(), torch.ones_like(IDS)
    mask[0, 3:] = 0
    whole = model(IDS, mask).detach()
    for transform in (tf.tokens("last"), tf.compose(tf.only(positions=-1), tf.pool("sum"))):
        with torch.no_grad(), th.capture(model, "inner", transform=transform) as rec:
            model(input_ids=IDS, attention_mask=mask)
        torch.testing.assert_close(rec["inner"], torch.stack([whole[0, 2], whole[1, 4]]))


@pytest.mark.parametrize("tokens", [ROWS, TOKENS])
def test_modules_of_torch_say_which_comes_first(tokens: int) -> None:
    x = torch.randn(tokens, ROWS, 8)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False).eval()
    for model, site in ((encoder, "layers.0"), (encoder, "layers.1.linear1"), (nn.LSTM(8, 8), "")):
        site = site or "(model)"
        at = (lambda edit: edits.at("0", edit)) if isinstance(model, nn.LSTM) else (lambda edit: edit)
        for choice, dim, chosen in (({"positions": -1}, 0, tokens - 1), ({"rows": 1}, 1, 1)):
            with torch.no_grad(), th.capture(model, site) as before:
                model(x)
            with torch.no_grad(), th.capture(model, site, edit={site: at(edits.only(edits.add(1), **choice))}) as rec:
                model(x)
            changed = next(iter(_tensors(rec[site]))) != next(iter(_tensors(before[site])))
            assert changed.movedim(dim, 0).flatten(1).any(1).nonzero().flatten().tolist() == [chosen], (site, choice)


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_batch_first_modules_keep_rows_first_whatever_the_call_looks_like() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:  # (T, N, D)
            return self.layer(x.transpose(0, 1))  # type: ignore[no-any-return]

    with torch.no_grad(), th.edit(model := Turns(), {"layer": edits.only(edits.zero(), rows=1)}):
        assert model(torch.randn(TOKENS, ROWS, 8)).eq(0).flatten(1).all(1).tolist() == [False, True]


XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48}
FSMT = {
    "langs": ["en", "de"],
    "src_vocab_size": 64,
    "tgt_vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


def changed_by_hooks(model: nn.Module, path: str, index: Any, call: dict[str, Tensor]) -> Tensor:
    """The logits after a bare hook has zeroed a part of what a module returns."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = (output[0] if isinstance(output, tuple) else output).clone()
        first[index] = 0
        return (first, *output[1:]) if isinstance(output, tuple) else first

    handle = model.get_submodule(path).register_forward_hook(hook)
    try:
        with torch.no_grad():
            return model(**call).logits  # type: ignore[no-any-return]
    finally:
        handle.remove()


@pytest.mark.parametrize(("choice", "index"), [({"positions": -1}, -1), ({"rows": 1}, (slice(None), 1))], ids=str)
@pytest.mark.parametrize("which", ["xlnet", "encoder", "decoder"])
def test_models_with_tokens_first(which: str, choice: dict[str, Any], index: Any) -> None:
    if which == "xlnet":
        model, path, call = from_config("XLNetLMHeadModel", XLNET), "transformer.layer.0", {"input_ids": IDS}
    else:
        model = from_config("FSMTForConditionalGeneration", FSMT)
        path, call = f"model.{which}.layers.0", {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    expected = changed_by_hooks(model, path, index, call)
    edit = edits.only(edits.zero(), **choice)
    with torch.no_grad(), th.edit(model, {path: edits.at("0", edit) if which != "encoder" else edit}):
        found = model(**call).logits
    assert torch.equal(found, expected)


def test_streams_that_come_before_rows_are_no_rows() -> None:
    class Streams(TimeFirst):
        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(self.embed(ids).expand(4, -1, -1, -1))  # type: ignore[no-any-return]

    model = Streams()
    before = model(IDS).detach()
    for choice, index in (({"rows": 1}, (slice(None), 1)), ({"positions": 2}, (slice(None), slice(None), 2))):
        expected = before.clone()
        expected[index] = 0
        with torch.no_grad(), th.edit(model, {"inner": edits.only(edits.zero(), **choice)}):
            assert torch.equal(model(IDS), expected)


def test_heads_and_rows_that_share_a_dim_are_told_apart_by_the_call() -> None:
    model = made("xglm")
    for choice, chosen in (
        ({"heads": 1}, [1, 5]),
        ({"rows": 1}, [4, 5, 6, 7]),
        ({"rows": 0, "heads": [0, -1]}, [0, 3]),
    ):
        with torch.no_grad(), th.capture(model, "@q.1") as before:
            model(IDS)
        with torch.no_grad(), th.capture(model, "@q.1", edit={"@q.1": edits.only(edits.zero(), **choice)}) as after:
            model(IDS)
        changed = (before["@q.1"] != after["@q.1"]).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == chosen, choice


def test_edges_are_cut_in_rows_and_heads_that_share_a_dim() -> None:
    model = made("xglm", attn_implementation="eager")
    site = "model.layers.1.self_attn/softmax"
    for choice, chosen in (({"heads": 2}, [2, 6]), ({"rows": 1}, [4, 5, 6, 7]), ({"rows": 1, "heads": 0}, [4])):
        edit = {f"{site}:input": edits.block(queries=-1, keys=1, **choice)}
        with torch.no_grad(), th.capture(model, site, edit=edit) as rec:
            model(IDS)
        assert rec[site][:, -1, 1].eq(0).nonzero().flatten().tolist() == chosen, choice


def test_alone_a_value_of_shared_rows_and_heads_says_how_to_count_them() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.scores = 4, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.scores(x @ x.mT), dim=-1)

    model = Attention()  # called with what has rows and heads as one already
    with th.edit(model, {"(model)/softmax": edits.only(edits.zero(), heads=1)}):
        with pytest.raises(EditError, match=r"share dim 0 of .*edits\.along\(which, dim=0\) counts all of them"):
            model(torch.randn(8, 5, 6))
