"""A model over its data for who takes tokens: each batch once, in the order of the source, the first one whole."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchhook._extract.api import Passes, evaluating_on
from torchhook._values.running import Block
from torchhook.errors import ExtractError, PaddingWarning


def run(passes: Passes) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    with evaluating_on(passes.model, None) as device:
        for batch in passes.epoch(pin=False):
            passes.run(batch, device, lambda name, block: found.setdefault(name, []).append(block))
    return found


def test_rows_are_numbered_in_the_order_in_which_they_come() -> None:
    x = torch.randn(7, 2, 3)
    found = run(Passes(nn.Sequential(nn.Identity()), x, "0", batch_size=3))["0"]
    assert torch.equal(torch.cat([block.tokens for block in found]), x.flatten(0, 1))
    assert torch.cat([block.rows for block in found]).tolist() == [i // 2 for i in range(14)]


def test_a_loader_is_read_as_it_is_and_may_be_in_another_order_each_time() -> None:
    x = torch.arange(12.0)[:, None]
    loader = DataLoader(TensorDataset(x), batch_size=5, shuffle=True, drop_last=True)
    passes = Passes(nn.Sequential(nn.Identity()), loader, "0")
    torch.manual_seed(0)
    first, second = (torch.cat([block.tokens for block in run(passes)["0"]]).flatten().tolist() for _ in range(2))
    assert len(set(first)) == len(set(second)) == 10
    assert first != second


def test_the_first_batch_is_run_whole_and_others_to_the_last_site() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    seen: list[int] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    run(Passes(model, torch.randn(9, 3), "0", batch_size=3))
    assert seen == [1]


def test_columns_come_in_the_order_of_the_sites() -> None:
    passes = Passes(nn.Sequential(nn.Identity(), nn.Identity()), torch.randn(2, 3), ["1", "0"])
    assert passes.ordered(["0[1]", "1", "0[0]", "0"]) == ["1", "0[1]", "0[0]", "0"]


def test_errors_name_the_rows() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 5).any():
                raise KeyError("five")
            return x

    with pytest.raises(KeyError) as error:
        run(Passes(nn.Sequential(Fails()), torch.arange(9.0)[:, None], "0", batch_size=2))
    if sys.version_info >= (3, 11):
        assert error.value.__notes__ == ["torchhook: raised by rows 4 to 5 of the data."]

    class Torn(TensorDataset):
        def __getitem__(self, index: int) -> Tensor:
            if index == 3:
                raise OSError("torn")
            return torch.zeros(2)

    with pytest.raises(OSError, match="torn") as told:
        run(Passes(nn.Sequential(nn.Identity()), Torn(torch.zeros(5)), "0", batch_size=2))
    if sys.version_info >= (3, 11):
        assert told.value.__notes__ == ["torchhook: raised while rows 2 to 3 of the data were loaded."]
    with pytest.raises(ExtractError, match="forward takes"):
        run(Passes(nn.Bilinear(2, 2, 1), torch.randn(4, 2), "(model)"))


def test_a_batch_as_long_as_its_rows_are_wide_is_tried_with_one_row() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1))

    with pytest.raises(ExtractError, match="tried with one row"):
        run(Passes(TimeFirst(), torch.randn(4, 4, 2), "inner", batch_size=4))


def test_padding_that_nobody_knows_of_is_warned_about_and_false_says_that_there_is_none() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]])
    model = nn.Sequential(nn.Embedding(10, 2))
    with pytest.warns(PaddingWarning, match="look padded"):
        run(Passes(model, ids, "0"))
    assert len(run(Passes(model, ids, "0", lengths=False))["0"][0].tokens) == 8
    cut = run(Passes(model, ids, "0", lengths=torch.tensor([4, 1])))["0"][0]
    assert len(cut.tokens) == 5
    with pytest.raises(ExtractError, match="lengths= has 3 values, the data 2 rows"):
        run(Passes(model, ids, "0", lengths=[1, 2, 3]))
