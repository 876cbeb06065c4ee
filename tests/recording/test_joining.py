"""Joining the values of several calls: batches, and the calls of a generation by their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._recording.steps import Pass


def recording(*calls: tuple[Any, Pass | None]) -> Recording:
    """A recording made by hand: the value of each call, and the pass it was in."""
    made = Recording("Net")
    for call, (value, passed) in enumerate(calls):
        if passed is not None:
            passed.first = next(made.order)
            made.passes.add(passed)
        made.opened(Site("h")).append((call, next(made.order), value))
        if passed is not None:
            passed.last = next(made.order)
    return made


def at(position: int | None, tokens: int | None, step: int = 0, sequence: int = 1) -> Pass:
    return Pass(0, step=step, position=position, tokens=tokens, sequence=sequence)


def tokens(*numbers: int) -> Tensor:
    return torch.tensor([numbers, numbers], dtype=torch.float32)


def test_batches_are_joined_on_their_rows_and_on_any_other_dim() -> None:
    rec = recording((torch.zeros(2, 3), None), (torch.ones(1, 3), None))
    assert rec.cat("h").shape == (3, 3)
    rec = recording((torch.zeros(2, 3), None), (torch.ones(2, 1), None))
    assert rec.cat("h", dim=1).shape == rec.cat("h", dim=-1).shape == (2, 4)
    with pytest.raises(ValueError, match=r"h: cannot concatenate \(2, 3\), \(2, 1\) on dim 0; use rec.all\('h'\)"):
        rec.cat("h")
    with pytest.raises(ValueError, match="on dim 2"):
        rec.cat("h", dim=2)


def test_a_generation_on_the_wrong_dim_says_which_is_right() -> None:
    rec = recording((tokens(1, 2), at(0, 2)), (tokens(3), at(2, 1, 1)))
    with pytest.raises(ValueError, match=r"on dim 0; rec\.cat\('h', dim=1\) joins the tokens of a generation"):
        rec.cat("h")
    assert rec.cat("h", dim=1)[0].tolist() == rec.cat("h", dim=-1)[0].tolist() == [1, 2, 3]


def test_packed_queries_are_joined_by_their_own_heads() -> None:
    """A kernel may be given the queries of one token by the heads of their keys: (N, 2, 2, D) are four heads."""
    whole = torch.randn(3, 4, 6, 8)
    site = Site("attn", op="scaled_dot_product_attention", port="input", leaf="args.0", role="@q.0")
    rec = Recording("Net")
    for call, (value, passed) in enumerate(
        [(whole[:, :, :5], at(0, 5)), (whole[:, :, 5:].reshape(3, 2, 2, 8), at(5, 1, 1))]
    ):
        passed.first = next(rec.order)
        rec.passes.add(passed)
        rec.opened(site).append((call, next(rec.order), value))
        passed.last = next(rec.order)
    assert torch.equal(rec.cat("@q.0", dim=2), whole)


def test_the_last_call_that_has_a_position_has_its_value() -> None:
    rec = recording(
        (tokens(0, 1, 2, 3), at(0, 4)),
        (tokens(20, 30, 40), at(2, 3, 1)),
        (tokens(300), at(3, 1, 2)),
        (tokens(400, 500), at(4, 2, 3)),
    )
    assert rec.cat("h", dim=1)[0].tolist() == [0, 1, 20, 300, 400, 500]
    assert rec.cat("h#1:", dim=1)[0].tolist() == [20, 300, 400, 500]
    assert [r.position for r in rec.records("h")] == [0, 2, 3, 4]


def test_what_was_taken_back_in_the_end_is_left_out() -> None:
    last = at(2, 3, 1)
    last.end = 4
    rec = recording((tokens(0, 1), at(0, 2)), (tokens(2, 3, 4), last))
    assert rec.cat("h", dim=1)[0].tolist() == [0, 1, 2, 3]


def test_every_leaf_is_cut_and_nothing_else() -> None:
    value = {"a": tokens(1, 2, 3), "b": (tokens(4, 5, 6), "word")}
    rec = recording((value, at(0, 3)), ({"a": tokens(9), "b": (tokens(8), "word")}, at(1, 1, 1)))
    joined = rec.cat("h", dim=1)
    assert joined["a"][0].tolist() == [1, 9]
    assert joined["b"][0][0].tolist() == [4, 8]
    assert joined["b"][1] == "word"


def test_values_that_do_not_hold_the_tokens_there_are_joined_while_nothing_is_overwritten() -> None:
    rec = recording((tokens(7), at(0, 3)), (tokens(8), at(3, 1, 1)))  # logits of the last token alone
    assert rec.cat("h", dim=1)[0].tolist() == [7, 8]
    rec = recording((tokens(7), at(0, 3)), (tokens(8), at(2, 1, 1)))
    with pytest.raises(ValueError, match=r"a call with 3 tokens has a value of shape \(2, 1\), so dim 1 does not hold"):
        rec.cat("h", dim=1)


def test_positions_that_are_not_known_leave_the_calls_as_they_are() -> None:
    rec = recording((tokens(1, 2), at(None, None)), (tokens(3), at(None, 1, 1)))
    assert rec.cat("h", dim=1)[0].tolist() == [1, 2, 3]


def test_a_layer_that_runs_twice_in_a_call_is_no_sequence() -> None:
    rec = recording((tokens(1, 2), at(0, 2)))
    rec.passes.latest.last = 9
    rec.opened(Site("h")).append((1, next(rec.order), tokens(3, 4)))
    with pytest.raises(ValueError, match="ran several times in one call of the model"):
        rec.cat("h", dim=1)
    assert rec.cat("h").shape == (4, 2)


def test_sequences_are_not_joined_to_one() -> None:
    rec = recording((tokens(1), at(0, 1)), (tokens(2), at(1, 1, 1)), (tokens(3), at(0, 1, 0, 2)))
    with pytest.raises(ValueError, match=r"several sequences.*'h#0:2', 'h#2:3'"):
        rec.cat("h", dim=1)
    assert rec.cat("h").shape == (6, 1)  # as rows, they are what they always were
    assert rec.cat("h#2:", dim=1)[0].tolist() == [3]


def test_beams_are_followed_row_by_row() -> None:
    rows = [torch.arange(4.0).reshape(4, 1) + 10 * step for step in range(3)]
    passes = [at(step, 1, step) for step in range(3)]
    for one in passes:
        one.beams = True
    rec = recording(*zip(rows, passes, strict=True))
    beams = torch.tensor([[0, 1, 3], [2, 2, -1]])
    assert rec.cat("h", dim=1, beams=beams).tolist() == [[0, 11, 23], [2, 12, 0]]
    assert rec.cat("h", dim=1, beams=beams[:, :2]).tolist() == [[0, 11], [2, 12]]
    assert rec.cat("h#0", dim=1).shape == (4, 1)
    for wrong in (torch.zeros(3), torch.zeros(2, 2), [0, 1]):
        with pytest.raises(ValueError, match="beams= takes the beam_indices that generate returns"):
            rec.cat("h", dim=1, beams=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beams= is for the calls of a generation"):
        recording((rows[0], None)).cat("h", dim=1, beams=beams)


def test_a_row_that_is_not_there_is_named() -> None:
    rec = recording((torch.zeros(2, 1), at(0, 1)))
    with pytest.raises(ValueError, match=r"beams= names row 5, and a value there has 2 rows"):
        rec.cat("h", dim=1, beams=torch.tensor([[5]]))


def named(site: Site, *calls: tuple[Any, Pass]) -> Recording:
    rec = recording(*calls)
    rec._rows[site] = rec._rows.pop(Site("h"))
    return rec


Q, K = Site("attn", role="@q.1"), Site("attn", role="@k.1")


def test_heads_are_no_tokens_and_the_dim_that_holds_these_is_named() -> None:
    prompt, new = torch.arange(96.0).reshape(2, 8, 6, 1), torch.arange(16.0).reshape(2, 8, 1, 1)
    rec = named(Q, (prompt, at(0, 6)), (new, at(6, 1, 1)))
    for dim in (1, -3, 3, 0):
        with pytest.raises(ValueError, match=r"rec\.cat\('@q\.1', dim=2\)") as told:
            rec.cat("@q.1", dim=dim)
        assert "cache" not in str(told.value)
    with pytest.raises(ValueError, match=r"of shape \(2, 8, 6, 1\), of which dim 2 holds the tokens, not dim 1: rec"):
        rec.cat("@q.1", dim=1)
    assert torch.equal(rec.cat("@q.1", dim=2), torch.cat([prompt, new], 2))


def test_as_many_heads_as_tokens_are_no_tokens_either() -> None:
    chunks = [torch.zeros(2, 8, 8, 4), torch.ones(2, 8, 8, 4)]
    rec = named(Q, (chunks[0], at(0, 8)), (chunks[1], at(8, 8)))
    with pytest.raises(ValueError, match=r"dim 2 holds the tokens, not dim 1: rec\.cat\('@q\.1', dim=2\)\."):
        rec.cat("@q.1", dim=1)
    assert rec.cat("@q.1", dim=2).shape == (2, 8, 16, 4)


def test_a_cache_is_spoken_of_where_there_is_one() -> None:
    rec = named(K, *((torch.zeros(2, 4, n, 8), at(n - m, m, i)) for i, (n, m) in enumerate([(6, 6), (7, 1), (8, 1)])))
    with pytest.raises(ValueError, match=r"dim 2 holds more.*those of a cache\. The last call.*rec\['@k\.1#-1'\]\."):
        rec.cat("@k.1", dim=2)
    with pytest.raises(ValueError, match=r"dim 2 holds the tokens, not dim 1; those of a cache.*rec\['@k\.1#-1'\]\."):
        rec.cat("@k.1", dim=1)
    with pytest.raises(ValueError, match=r"The last call has them all: rec\['@k\.1#2'\]\."):  # of those that were named
        rec.cat("@k.1#1:", dim=2)
    assert rec["@k.1#-1"].shape[2] == 8
    sliding = named(K, *((torch.zeros(2, 4, n, 8), at(p, t, i)) for i, (n, p, t) in enumerate([(6, 0, 6), (4, 6, 1)])))
    with pytest.raises(ValueError, match=r"The last call has the last 4: rec\['@k\.1#-1'\]; rec\.records\('@k\.1'\)"):
        sliding.cat("@k.1", dim=2)


def test_an_input_of_a_cache_is_read_by_an_address_that_is_one() -> None:
    site = Site("attn", op="scaled_dot_product_attention", port="input")
    rec = named(site, (torch.zeros(2, 4, 6, 8), at(0, 6)), (torch.zeros(2, 4, 7, 8), at(6, 1, 1)))
    with pytest.raises(ValueError, match="of a cache") as told:
        rec.cat(str(site), dim=2)
    address = str(told.value).split("rec['")[1].split("']")[0]
    assert rec[address].shape[2] == 7


def test_one_of_several_tensors_may_be_a_cache() -> None:
    site = Site("attn", op="scaled_dot_product_attention", port="input")
    steps = [(torch.zeros(2, 8, n, 4), torch.zeros(2, 2, m, 4)) for n, m in ((6, 6), (1, 7))]
    rec = named(site, (steps[0], at(0, 6)), (steps[1], at(6, 1, 1)))
    for dim in (1, 2):
        with pytest.raises(ValueError, match=r"of a cache.*rec\['attn/scaled_dot_product_attention#-1:input'\]\."):
            rec.cat(str(site), dim=dim)


def test_values_that_hold_tokens_in_no_dim_of_their_own_are_not_said_to_be_a_cache() -> None:
    rec = named(Site("moe", role="@experts.1"), (torch.zeros(12, 32), at(0, 6)), (torch.zeros(2, 32), at(6, 1, 1)))
    with pytest.raises(ValueError, match=r"and dim 1 of it does not hold its tokens; use rec\.all\('@experts\.1'\)\."):
        rec.cat("@experts.1", dim=1)
    last = named(Q, (torch.zeros(2, 8, 4), at(0, 6)), (torch.zeros(2, 8, 4), at(6, 1, 1)))  # of the last token alone
    with pytest.raises(ValueError, match=r"does not hold its tokens; use rec\.all\('@q\.1'\)\."):
        last.cat("@q.1", dim=1)
    pattern = Site("attn", role="@pattern.1")
    maps = named(pattern, (torch.zeros(2, 4, 6, 6), at(0, 6)), (torch.zeros(2, 4, 1, 7), at(6, 1, 1)))
    for dim in (1, 2, 3):
        with pytest.raises(ValueError, match=r"use rec\.all\('@pattern\.1'\)"):
            maps.cat("@pattern.1", dim=dim)


def test_channels_are_no_tokens() -> None:
    rec = recording((torch.zeros(2, 6, 32), at(0, 6)), (torch.zeros(2, 1, 32), at(6, 1, 1)))
    with pytest.raises(ValueError, match=r"dim 1 holds the tokens, not dim 2: rec\.cat\('h', dim=1\)\."):
        rec.cat("h", dim=2)


def test_beams_are_joined_on_the_dim_of_their_tokens_alone() -> None:
    def searched(site: Site, *values: Tensor) -> Recording:
        passes = [at(0, 5), at(5, 1, 1), at(6, 1, 2)]
        for one in passes:
            one.beams = True
        return named(site, *zip(values, passes, strict=True))

    beams = torch.tensor([[0, 1, 1]])
    caches = searched(K, *(torch.zeros(2, 4, n, 8) for n in (5, 6, 7)))
    with pytest.raises(ValueError, match="those of a cache"):
        caches.cat("@k.1", dim=2, beams=beams)
    with pytest.raises(ValueError, match="those of a cache"):
        caches.cat("@k.1", dim=2)
    rec = searched(Site("h"), *(torch.zeros(2, n, 8) for n in (5, 1, 1)))
    with pytest.raises(ValueError, match=r"dim 1 holds the tokens, not dim 0: rec\.cat\('h#1:', dim=1, beams=out"):
        rec.cat("h#1:", beams=beams)
    with pytest.raises(ValueError, match=r"not dim 2: rec\.cat\('h', dim=1, beams=out\.beam_indices\)\."):
        rec.cat("h", dim=2)
    assert rec.cat("h", dim=1, beams=beams).shape == (1, 7, 8)


def advice(rec: Recording, key: str) -> str:
    with pytest.raises(LookupError) as told:
        rec[key]
    return str(told.value).partition("take ")[2]


def test_a_site_that_ran_more_than_once_names_a_call_that_joins_it() -> None:
    given = [(6, 0), (1, 6), (1, 7)]
    steps = [(torch.zeros(2, n, 32), at(position, n, step)) for step, (n, position) in enumerate(given)]
    rec = recording(*steps)
    assert advice(rec, "h") == "rec.all('h') or rec.cat('h', dim=1)."
    assert advice(rec, "h#1:") == "rec.all('h#1:') or rec.cat('h#1:', dim=1)."
    heads = named(Q, (torch.zeros(2, 8, 6, 4), at(0, 6)), (torch.zeros(2, 8, 1, 4), at(6, 1, 1)))
    assert advice(heads, "@q.1") == "rec.all('@q.1') or rec.cat('@q.1', dim=2)."
    caches = named(K, (torch.zeros(2, 8, 6, 4), at(0, 6)), (torch.zeros(2, 8, 7, 4), at(6, 1, 1)))
    assert advice(caches, "@k.1") == "rec.all('@k.1')."
    twice = recording(*steps, (torch.zeros(2, 3, 32), at(0, 3, 0, 2)), (torch.zeros(2, 1, 32), at(3, 1, 1, 2)))
    assert advice(twice, "h") == "rec.all('h') or rec.cat('h#0:3', dim=1)."
    first = at(0, 6)
    first.kept = 1
    last = recording((torch.zeros(2, 1, 50), first), (torch.zeros(2, 1, 50), at(6, 1, 1)))
    assert advice(last, "h") == "rec.all('h') or rec.cat('h', dim=1)."
    assert advice(recording((torch.zeros(2, 3), None), (torch.zeros(2, 5), None)), "h") == "rec.all('h')."
    for made in (rec, heads, twice, last):  # whoever takes the advice gets a value
        for key in made:
            assert eval(advice(made, key).rpartition(" or ")[2].rstrip("."), {"rec": made}).dim() > 2
