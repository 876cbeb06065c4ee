"""Where heads are in a shape: found where one answer fits, and refused with what was tried where none or two do."""

from __future__ import annotations

import pytest

from torchhook._values.heads import UNKNOWN, HeadAxis, KnownHeads, NoPart, head_axis

PROJECTION = KnownHeads("attn", queries=8, keys=2, dims=(4,), joined=True)
SPLIT = PROJECTION._replace(joined=False, why_not="they are in a dim of their own")
FUSED = PROJECTION._replace(op="scaled_dot_product_attention", joined=False)


@pytest.mark.parametrize(
    ("shape", "known", "axis"),
    [
        ((3, 5, 32), PROJECTION, HeadAxis(2, 8, joined=True)),
        ((3, 5, 8), PROJECTION, HeadAxis(2, 2, joined=True)),
        ((15, 32), PROJECTION, HeadAxis(1, 8, joined=True)),
        ((3, 5, 96), PROJECTION._replace(keys=8, sections=32), HeadAxis(2, 8, 3, joined=True)),
        ((3, 5, 64), PROJECTION._replace(keys=8, sections=32), HeadAxis(2, 8, 2, joined=True)),
        ((3, 5, 48), PROJECTION._replace(dims=(4, 6)), HeadAxis(2, 8, joined=True)),
        ((3, 8, 5, 4), SPLIT, HeadAxis(1, 8)),
        ((3, 5, 2, 4), SPLIT, HeadAxis(2, 2)),
        ((3, 8, 8, 4), FUSED, HeadAxis(1, 8)),
        ((3, 2, 8, 4), FUSED, HeadAxis(1, 2)),
    ],
)
def test_heads_are_found(shape: tuple[int, ...], known: KnownHeads, axis: HeadAxis) -> None:
    assert head_axis(shape, known) == axis


@pytest.mark.parametrize(
    ("shape", "known", "said"),
    [
        ((3, 5, 32), UNKNOWN, "known in a session only"),
        ((3, 5, 32), SPLIT, "they are in a dim of their own"),
        (
            (3, 5, 33),
            PROJECTION,
            "no number of heads times their size: attn has 8 heads and 2 of keys and values of size 4",
        ),
        ((3, 5, 32), PROJECTION._replace(dims=()), "no number of heads times their size: attn has 8 heads"),
        ((3, 5, 48), PROJECTION, "a fused projection of size 48"),
        ((3, 5, 96), PROJECTION._replace(keys=8), "a fused projection of size 96"),
        ((3, 5, 96), PROJECTION._replace(keys=8, sections=24), "a fused projection of size 96"),
        ((3, 8, 8, 4), SPLIT, "heads may be dim 1 or dim 2"),
        ((3, 8, 2, 4), SPLIT, "heads may be dim 1 or dim 2"),
        ((3, 5, 6, 4), FUSED, "neither dim 1 nor dim 2"),
        ((), PROJECTION, "no number of heads"),
    ],
)
def test_heads_are_never_guessed(shape: tuple[int, ...], known: KnownHeads, said: str) -> None:
    with pytest.raises(NoPart, match=said):
        head_axis(shape, known)
