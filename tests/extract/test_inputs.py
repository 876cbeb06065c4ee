"""Data that does not fit the model: said in terms of the data, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torchhook as th
from torchhook._features.api import open_features
from torchhook.errors import ExtractError, StoreMismatchError

IDS = torch.arange(12).reshape(4, 3)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.embed(input_ids)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, y)


def extracted(model: nn.Module, data: Any, site: str, out: Path, **options: Any) -> Any:
    return th.extract(model, data, site, out, progress=False, **options)


# -- what a tokenizer gives ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dict", "tokenizer", "arrays", "lists"])
def test_columns_as_a_tokenizer_gives_them_are_rows(tmp_path: Path, kind: str) -> None:
    model, columns = Words(), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    data: Any = columns
    if kind == "tokenizer":
        data = pytest.importorskip("transformers").BatchEncoding(columns)
    elif kind == "arrays":
        data = {name: column.numpy() for name, column in columns.items()}
    elif kind == "lists":
        data = {name: column.tolist() for name, column in columns.items()}
    found = extracted(model, data, "embed", tmp_path / "f", batch_size=3)
    assert torch.equal(found["embed"][:], model.embed.weight[IDS].detach())
    # The same columns again do nothing, and others are refused.
    extracted(model, data, "embed", tmp_path / "f")
    with pytest.raises(StoreMismatchError, match="of the data are not the same"):
        extracted(model, {**columns, "input_ids": IDS.flip(0)}, "embed", tmp_path / "f")


def test_labels_and_ids_travel_in_columns_too(tmp_path: Path) -> None:
    data = {"input_ids": IDS, "labels": torch.tensor([3, 1, 4, 1]), "name": ["a", "b", "c", "d"]}
    found = extracted(Words(), data, "embed", tmp_path / "f", ids="name")
    assert found.labels[:].tolist() == [3, 1, 4, 1]
    assert list(found.ids) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"input_ids": [[1, 2], [3]]}, "data['input_ids'] is a list whose rows make no tensor: .*padding=True"),
        ({"input_ids": IDS, "mask": IDS[:2]}, "the same number of rows: 'input_ids' has 4, 'mask' has 2"),
        ({"train": TensorDataset(IDS)}, "pass one of them: data['train']"),
        ({}, "the same number of rows: there are none"),
        (["a text", "another"], "the rows are texts ('a text', …), and the model takes tensors. .*tokenizer(texts"),
        ([["a text", "another"]], "the rows are texts ('a text', …)"),
    ],
)
def test_what_is_no_table_of_tensors_is_refused_with_the_way_out(tmp_path: Path, data: Any, text: str) -> None:
    pattern = ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(ExtractError, match=pattern):
        extracted(Words(), data, "embed", tmp_path / "f")
    assert not (tmp_path / "f").exists() or not any((tmp_path / "f").iterdir())


def test_texts_are_fine_where_a_function_or_the_model_reads_them(tmp_path: Path) -> None:
    def tokenize(texts: Any) -> Any:
        return {"input_ids": torch.tensor([[len(text)] for text in texts])}

    found = extracted(Words(), ["ab", "abc"], "embed", tmp_path / "f", input_fn=tokenize)
    assert found["embed"].shape == (2, 1, 2)


# -- several inputs ------------------------------------------------------------------------------------


def test_a_model_of_two_inputs_names_them_and_the_function_that_gives_both(tmp_path: Path) -> None:
    model, x, y = Both(), torch.rand(5, 3), torch.rand(5, 3)
    with pytest.raises(
        ExtractError, match=r"forward takes 'x', 'y', .* missing a required argument: 'y'.*input_fn=tuple"
    ):
        extracted(model, TensorDataset(x, y), "add", tmp_path / "f")
    found = extracted(model, TensorDataset(x, y), "add", tmp_path / "f", input_fn=tuple)
    assert torch.allclose(found["add"][:], model(x, y).detach())
    with pytest.raises(ExtractError, match=r"what input_fn makes of a batch is .*missing a required argument: 'y'"):
        extracted(model, TensorDataset(x, y), "add", tmp_path / "g", input_fn=lambda batch: batch[0])


def test_a_type_error_of_the_models_own_stays_what_it_is(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("my own")

    with pytest.raises(TypeError, match=r"^my own$"):
        extracted(Own(), torch.ones(2, 3), "(model)", tmp_path / "f")


# -- rows that cannot be loaded --------------------------------------------------------------------------


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise OSError("disk on fire")
        return torch.ones(3)


def test_an_error_of_the_data_says_which_rows_and_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk on fire") as caught:
        extracted(nn.Linear(3, 2), Broken(), "(model)", tmp_path / "f", batch_size=2, rows_per_shard=2)
    notes = " ".join(getattr(caught.value, "__notes__", ["rows 4 to 5 on_error='skip'"]))
    assert "rows 4 to 5" in notes
    assert "on_error='skip'" in notes


# -- where it goes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [None, 3])
def test_features_need_a_place(out: Any) -> None:
    with pytest.raises(TypeError, match=rf"out={out}: give the path of a folder.*th\.capture"):
        th.extract(nn.Linear(3, 2), torch.ones(2, 3), "(model)", out)


def test_a_dry_run_over_the_store_of_another_run_is_refused_as_the_run_would_be(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    extracted(model, torch.ones(40, 3), "(model)", tmp_path / "f")
    with pytest.raises(StoreMismatchError, match="rows: the store has 40, this run 80"):
        extracted(model, torch.ones(80, 3), "(model)", tmp_path / "f", dry_run=True)
    fresh = extracted(model, torch.ones(80, 3), "(model)", tmp_path / "f", dry_run=True, resume=False)
    assert (fresh.nbytes, fresh.todo) == (80 * 8, fresh.manifest.shards)
    assert len(open_features(tmp_path / "f")) == 40
    assert extracted(model, torch.ones(40, 3), "(model)", tmp_path / "f", dry_run=True).todo == 0


def test_another_model_is_told_by_names_and_never_by_digests(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, names: list[str], bias: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.names = nn.Linear(3, 2), names
            nn.init.constant_(self.fc.bias, bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    x = torch.as_tensor(np.ones((4, 3), np.float32))
    extracted(Scaled(["a"] * 50, 0.0), x, "fc", tmp_path / "f")
    with pytest.raises(StoreMismatchError) as caught:
        extracted(Scaled(["b"] * 50, 1.0), x, "fc", tmp_path / "f")
    lines = str(caught.value).splitlines()
    assert "  model: other numbers in 1 of 2 tensors (fc.bias)" in lines
    assert any(line.endswith("Scaled.names: not the same") for line in lines)
    assert not re.search(r"\b[0-9a-f]{12}\b", "\n".join(lines[1:]))
