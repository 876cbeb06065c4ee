"""What is padding, by hand: small masks, read off by eye."""

from __future__ import annotations

import threading

import pytest
import torch

from torchhook import transforms as tf
from torchhook._values.padding import Asked, Masks, given, knowing, known, places, real
from torchhook.errors import TransformError

MASK = torch.tensor([[True, True, False], [False, True, True], [False, False, True]])
X = torch.arange(18.0).reshape(3, 3, 2)


def test_each_row_is_reduced_as_if_it_were_alone():
    cut = [row[mask] for row, mask in zip(X, MASK, strict=True)]
    with knowing(Masks((("m", MASK),))):
        assert torch.equal(tf.pool()(X), torch.stack([row.mean(0) for row in cut]))
        assert torch.equal(tf.pool("max")(-X), torch.stack([(-row).amax(0) for row in cut]))
        assert torch.equal(tf.pool("sum")(X), torch.stack([row.sum(0) for row in cut]))
        assert torch.equal(tf.pool("max")(-X.int()), torch.stack([(-row.int()).amax(0) for row in cut]))
        assert torch.equal(tf.pool("max")(X > 100), torch.zeros(3, 2, dtype=torch.bool))
        assert torch.equal(tf.tokens("cls")(X), torch.stack([row[0] for row in cut]))
        assert torch.equal(tf.tokens("last")(X), torch.stack([row[-1] for row in cut]))
        assert torch.equal(tf.tokens([-1, 0])(X), torch.stack([row[[-1, 0]] for row in cut]))
    assert torch.equal(tf.pool()(X), X.mean(1))


def test_what_stands_in_the_padding_does_not_matter():
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = X.masked_fill(~MASK[..., None], bad)
        with knowing(Masks((("m", MASK),))):
            for how in ("mean", "max", "sum"):
                assert torch.equal(tf.pool(how)(spoiled), tf.pool(how)(X))
            assert torch.equal(tf.tokens("last")(spoiled), tf.tokens("last")(X))


def test_the_mean_of_many_halves_is_within_their_range():
    rows = torch.full((2, 1000, 1), 600.0, dtype=torch.float16)
    with knowing(given("lengths=", [1000, 500], 2)):
        assert tf.pool()(rows).tolist() == [[600.0], [600.0]]


def test_means_of_integers_are_refused_as_torch_does():
    with knowing(Masks((("m", MASK),))), pytest.raises(RuntimeError, match="mean"):
        tf.pool()(X.int())


def test_attention_maps_are_masked_along_both_their_ends():
    maps = torch.rand(3, 4, 3, 3)
    with knowing(Masks((("m", MASK),))):
        found = tf.pool()(maps)
    by_hand = [one[:, mask][:, :, mask].mean((1, 2)) for one, mask in zip(maps, MASK, strict=True)]
    torch.testing.assert_close(found, torch.stack(by_hand))


def test_a_dim_that_is_not_reduced_keeps_its_padding():
    with knowing(Masks((("m", MASK),))):
        assert torch.equal(tf.pool(dims=2)(X), X.mean(2))
        assert torch.equal(tf.pool()(X[:, 0]), X[:, 0])


def test_composed_transforms_know_what_is_left():
    x = torch.randn(3, 3, 2)
    with knowing(Masks((("m", MASK[:2]),))):
        narrowed = tf.compose(tf.narrow(1, 3), tf.tokens("last"))(x[:2])
    with knowing(Masks((("m", MASK),))):
        assert torch.equal(tf.compose(tf.tokens([0]), tf.pool())(x), tf.tokens("cls")(x))
        assert torch.equal(tf.compose(tf.compose(tf.tokens([0])), tf.pool())(x), tf.tokens("cls")(x))
        assert torch.equal(tf.compose(torch.neg, tf.pool())(x), -tf.pool()(x))
    assert torch.equal(narrowed, torch.stack([x[0, 1], x[1, 2]]))
    assert known() is None


def test_what_no_row_has_is_refused():
    with knowing(Masks((("m", MASK),))):
        with pytest.raises(TransformError, match=r"tokens at \[1\]: row 2 of the batch has 1 that are not padding"):
            tf.tokens(1)(X)
        with pytest.raises(TransformError, match="tokens\\('patches'\\) of rows with padding"):
            tf.tokens("patches")(X)
        assert tf.tokens("patches", masked=False)(X).shape == (3, 2, 2)


def test_padding_is_known_to_the_thread_that_runs_the_model_only():
    seen = []
    with knowing(Masks((("m", MASK),))):
        thread = threading.Thread(target=lambda: seen.append(known()))
        thread.start()
        thread.join()
        assert known() is not None
    assert seen == [None]


def test_a_mask_without_padding_changes_nothing_and_is_still_checked():
    whole = Masks((("m", torch.ones(3, 3, dtype=torch.bool)),))
    with knowing(whole):
        assert torch.equal(tf.pool()(X), X.mean(1))
        with pytest.raises(
            TransformError, match=r"known is the mask m \(3, 3\), and the value has 3 rows of 2 positions"
        ):
            tf.pool()(X[:, :2])


def test_places_count_real_positions_from_both_ends():
    assert places(MASK[:2], [0, 1, -1, -2]).tolist() == [[0, 1, 1, 0], [1, 2, 2, 1]]


def test_masks_may_number_what_they_mark_and_floats_must_be_zero_or_one():
    assert given("m", [[2, 1, 0]], 1).at(1, 3).tolist() == [[True, True, False]]
    assert given("m", torch.tensor([[1.0, 0.0]]), 1).at(1, 2).tolist() == [[True, False]]
    with pytest.raises(TransformError, match="holds other values than 0 and 1"):
        given("m", torch.tensor([[0.0, -1e9]]), 1)
    with pytest.raises(TransformError, match=r"shape \(1, 2, 3\)"):
        given("m", torch.ones(1, 2, 3), 1)


def test_who_asks_without_an_answer_is_noted():
    asked = Asked(None)
    with knowing(asked):
        assert torch.equal(tf.pool()(X[:, 0]), X[:, 0])
        assert not asked.asked
        assert real(X, [1]) is None
    assert asked.asked


# -- positions that are narrowed first --------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("cut", [(1, None), (0, -1), (1, -1), (None, None), (2, None, 1)])
def test_narrowed_rows_are_those_of_the_row_alone(side, cut):
    lengths, width = [6, 3, 5, 4], 6
    x = torch.randn(4, width, 2)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = mask if side == "right" else mask.flip(1)
    with knowing(given("lengths=", mask, 4)):
        found = tf.compose(tf.narrow(*cut), tf.pool("mean"))(x)
    wanted = torch.stack([row[real][slice(*cut)].mean(0) for row, real in zip(x, mask, strict=True)])
    assert torch.allclose(found, wanted)


@pytest.mark.parametrize(("side", "cut"), [("right", (-3, None)), ("left", (0, 3)), ("left", (0, None, 2))])
def test_narrowing_that_cuts_off_what_a_row_alone_would_keep_is_refused(side, cut):
    mask = torch.arange(6) < torch.tensor([6, 5])[:, None]
    mask = mask if side == "right" else mask.flip(1)
    narrowed = tf.compose(tf.narrow(*cut), tf.pool("mean"))
    with knowing(given("lengths=", mask, 2)):
        with pytest.raises(TransformError, match=r"narrow.*row 1 of the batch.*tokens"):
            narrowed(torch.randn(2, 6, 2))
    with knowing(given("lengths=", torch.ones(2, 6), 2)):
        narrowed(torch.randn(2, 6, 2))  # nothing is padded


def test_what_is_narrowed_first_asks_for_the_padding_too():
    asked = Asked(given("lengths=", [2, 3], 2))
    with knowing(asked):
        tf.narrow(0, 2)(torch.randn(2, 3, 2))
        assert not asked.asked
        tf.compose(tf.narrow(0, 3), tf.narrow(0, 2), tf.pool("mean"))(torch.randn(2, 3, 2))
    assert asked.asked


def test_statistics_over_positions_counted_from_the_end_leave_padding_out():
    x, known = torch.randn(2, 3, 4), given("lengths=", [2, 3], 2)
    with knowing(known):
        found = tf.statistics((-2,))(x)
    assert torch.allclose(found["mean"][0], x[0, :2].mean(0))
