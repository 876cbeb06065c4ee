"""The picture of a lens."""

from __future__ import annotations

import pytest
import torch

from torchhook import plot
from torchhook._recording.lenses import Lens


def _lens() -> Lens:
    generator = torch.Generator().manual_seed(0)
    values = {f"@resid_post.{i}": (i + 1) * torch.randn(2, 4, 9, generator=generator) for i in range(3)}
    return Lens(list(values), values.__getitem__, 2, lambda token: f"w{token}")


def test_every_cell_has_its_token_and_the_last_site_is_above() -> None:
    lens = _lens()
    ax = plot.lens(lens, sample=1).axes[0]
    shown = [text.get_text() for text in ax.texts]
    assert shown[:4] == [f"w{int(token)}" for token in lens.tokens[2, 1, :, 0]]
    assert next(label.get_text() for label in ax.get_yticklabels()) == "@resid_post.2"
    torch.testing.assert_close(
        torch.as_tensor(ax.images[0].get_array().data[0]).float(), lens.probabilities[2, 1, :, 0]
    )


def test_columns_are_named_by_the_inputs_tokens_and_positions_can_be_chosen() -> None:
    ax = plot.lens(_lens(), tokens=["The", "$cat", "sat", "\n"], positions=[-1, 0]).axes[0]
    assert len([label.get_text() for label in ax.get_xticklabels()]) == 2
    with pytest.raises(ValueError, match="cannot name 4 positions"):
        plot.lens(_lens(), tokens=["The"])


def test_rows_and_positions_that_are_not_there_are_refused() -> None:
    for row in (2, -3):
        with pytest.raises(ValueError, match=rf"sample={row}: the lens has 2 rows"):
            plot.lens(_lens(), sample=row)
    with pytest.raises(ValueError, match=r"positions \[9\] are out of range: the lens has 4 positions"):
        plot.lens(_lens(), positions=[0, 9])
