"""``edits.patch``: positions as ``edits.only`` has them, masks, and what is refused; by values put in by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits
from torchhook.errors import EditError


def tokens() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 5, 4), torch.randn(2, 5, 4)


def patched(edit: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer gives with a patch, what it gave when recorded, and what it gives without."""
    model, clean, other = tokens()
    with torch.no_grad():
        _, rec = th.run(model, clean, capture="0")
        with th.edit(model, {"0": edit(rec)}), th.capture(model, "0") as after:
            model(other)
        return after["0"], rec["0"], model[0](other)  # type: ignore[index]


def test_patched_positions_are_those_of_only() -> None:
    mask = torch.tensor([[True, False, False, True, False], [False, True, False, False, False]])
    lines = torch.tensor([[1, 0], [2, -1]])
    found, new, expected = patched(lambda rec: edits.patch(rec, positions=lines))
    expected[torch.arange(2)[:, None], lines] = new[torch.arange(2)[:, None], lines]
    assert torch.equal(found, expected)
    found, new, expected = patched(lambda rec: edits.patch(rec, positions=mask))
    assert torch.equal(found, torch.where(mask[..., None], new, expected))
    found, new, expected = patched(lambda rec: edits.patch(rec, positions=mask[0]))
    assert torch.equal(found, torch.where(mask[0][:, None], new, expected))
    found, new, expected = patched(lambda rec: edits.patch(rec, positions=[3, 1], dim=-1))
    expected[..., [1, 3]] = new[..., [1, 3]]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([1.5], "give an integer"),
        ([], "chooses nothing"),
        ("last", "give an integer"),
        (True, "give an integer"),
        (edits.along(1, dim=0), "name the dim with dim="),
    ],
    ids=str,
)
def test_what_are_no_positions_is_refused_when_the_patch_is_made(positions: Any, said: str) -> None:
    _, clean, _ = tokens()
    _, rec = th.run(nn.Sequential(nn.Identity()), clean, capture="0")
    with pytest.raises((TypeError, ValueError), match=f"positions.*{said}"):
        edits.patch(rec, positions=positions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positions": 11}, "positions=11 is outside of the 5"),
        ({"positions": [0, -6]}, "positions=-6 is outside of the 5"),
        ({"positions": [1, -4]}, "names one twice"),
        ({"positions": torch.ones(4, dtype=torch.bool)}, "mask of positions has 4 elements, and there are 5"),
        ({"positions": torch.ones(3, 5, dtype=torch.bool)}, "3 lines, and there are 2 rows"),
        ({"positions": torch.ones(2, 4, dtype=torch.bool)}, "is 4 long, and there are 5"),
        ({"positions": 0, "dim": 3}, "no dim 3"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"shape \(2, 5\).*shape \(2, 5, 4\).*positions=mask"),
        ({"mask": torch.ones(7, 1, 1, 4, dtype=torch.bool)}, r"shape \(7, 1, 1, 4\) does not fit"),
    ],
    ids=str,
)
def test_a_patch_that_does_not_fit_names_the_site(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EditError, match=rf"^0#0: edits\.patch\(…, (positions|mask)=.*{said}"):
        patched(lambda rec: edits.patch(rec, **options))


def test_a_patch_takes_a_recording_and_a_mask_of_booleans() -> None:
    with pytest.raises(TypeError, match="holds, found dict"):
        edits.patch({"0": torch.zeros(1)})  # type: ignore[arg-type]
    _, rec = th.run(nn.Sequential(nn.Identity()), torch.ones(1, 2), capture="0")
    for mask in (torch.ones(1, 2), [True, False]):
        with pytest.raises(TypeError, match=r"give a tensor of booleans, found (a tensor of torch.float32|list)"):
            edits.patch(rec, mask=mask)  # type: ignore[arg-type]
