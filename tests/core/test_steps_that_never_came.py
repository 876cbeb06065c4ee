"""An edit whose steps never come says so when the block ends, as a capture whose site never ran does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from tests.language_models import small_gpt2
from tests.oracle import warned
from torchhook import edits
from torchhook.errors import NeverRanWarning

SITE = "transformer.h.0.mlp"


def told(edit: Any, run: Any, site: str = SITE) -> dict[str, str]:
    """What is missing, checked to be what the warning says."""
    model, call = small_gpt2()
    with warned() as caught:
        with th.edit(model, {site: edit}) as rec, torch.no_grad():
            run(model, call["input_ids"])
    ours = [one for one in caught if one.category is NeverRanWarning]
    assert len(ours) == bool(rec.missing)
    for address, why in rec.missing.items():
        assert f"{address!r}: {why}" in str(ours[0].message)
        assert ours[0].filename == __file__
    return rec.missing


def generate(model: Any, ids: torch.Tensor) -> None:
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("steps", "which"),
    [
        (7, "step 7"),
        ([0, 7, 9], "steps 7, 9"),
        ([9], "step 9"),
        (slice(5, None), "steps 5:"),
        (slice(4, 6), "steps 4:6"),
        (0, None),
        ([3, 0], None),
        (slice(2, 30), None),
        (slice(None), None),
    ],
)
def test_steps_that_never_came_are_told(steps: Any, which: str | None) -> None:
    wanted = {} if which is None else {f"{SITE}, {which}": "an edit waits for it, and the last step was 3."}
    scaled = edits.scale(0.5)
    for edit in (edits.only(scaled, steps=steps), [scaled, edits.only(scaled, steps=steps, positions=-1)]):
        assert told(edit, generate) == wanted


def test_a_pass_outside_of_a_generation_is_step_0() -> None:
    missing = told(edits.only(edits.zero(), steps=1), lambda model, ids: model(ids))
    assert list(missing) == [f"{SITE}, step 1"]
    assert "no token came after the prompt; a pass outside of generate is step 0" in missing[f"{SITE}, step 1"]
    assert not told(edits.only(edits.zero(), steps=0), lambda model, ids: model(ids))


def test_edits_inside_of_others_are_heard() -> None:
    late = edits.only(edits.scale(0.5), steps=8)
    for edit in (edits.at("0", late), edits.at("0", [edits.scale(1), late])):
        assert list(told(edit, generate, "transformer.h.1.attn")) == ["transformer.h.1.attn, step 8"]
    assert list(told(edits.only(late, positions=-1), generate)) == [f"{SITE}, step 8"]
    # The outer one never let it come to that.
    assert list(told(edits.only(late, steps=9), generate)) == [f"{SITE}, step 9"]
    cut = edits.only(edits.block(-1, 0), steps=6)
    op = "transformer.h.0.attn/scaled_dot_product_attention:input"
    assert list(told(cut, generate, op)) == [f"{op}, step 6"]
    assert list(told(late, generate, "@v.0")) == ["@v.0, step 8"]


def test_a_site_that_never_ran_is_told_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    model = Two()
    with pytest.warns(NeverRanWarning, match="1 selected site never ran"):
        with th.edit(model, {"unused": edits.only(edits.zero(), steps=3)}) as rec:
            model(torch.ones(1, 2))
    assert list(rec.missing) == ["unused"]


def test_what_is_captured_beside_the_edit_is_there() -> None:
    model, call = small_gpt2()
    session = th.capture(model, SITE, edit={SITE: edits.only(edits.zero(), steps=5)})
    for _ in range(2):  # and counted anew
        with pytest.warns(NeverRanWarning, match=f"'{SITE}, step 5'"), torch.no_grad():
            _, rec = session.run(**call)
        assert rec[SITE].shape == (2, 6, 32)
        assert SITE in rec


def test_a_block_that_fails_says_nothing_more() -> None:
    model, call = small_gpt2()
    session = th.edit(model, {SITE: edits.only(edits.zero(), steps=5)})
    with contextlib.suppress(ZeroDivisionError), session as rec, torch.no_grad():
        model(**call)
        _ = 1 / 0
    assert rec.missing == {f"{SITE}, step 5": "the block ended early with ZeroDivisionError."}
