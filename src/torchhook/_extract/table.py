"""Data by columns, as a tokenizer gives it: the same rows in every column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchhook._values import tree
from torchhook.errors import ExtractError


class Columns(Dataset[Any]):
    """A mapping of columns as a data set whose rows are mappings.

    >>> Columns({"input_ids": torch.tensor([[1, 2], [3, 4]]), "id": ["a", "b"]})[1]
    {'input_ids': tensor([3, 4]), 'id': 'b'}
    """

    def __init__(self, columns: Mapping[Any, Any]) -> None:
        self.columns = {str(name): _column(str(name), column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name!r} has {length}" for name, length in lengths.items()) or "there are none"
            raise ExtractError(f"data is a mapping, whose columns need the same number of rows: {told}.")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The columns that are tensors."""
        return tuple(column for column in self.columns.values() if isinstance(column, Tensor))


def _column(name: str, column: Any) -> Tensor | Sequence[Any]:
    if isinstance(column, Tensor) and column.dim():
        return column
    if isinstance(column, np.ndarray) and column.ndim:
        return torch.as_tensor(column)
    if isinstance(column, (list, tuple)):
        if all(isinstance(row, str) for row in column):
            return column
        try:
            return torch.as_tensor(column)
        except (ValueError, TypeError) as error:
            raise ExtractError(
                f"data[{name!r}] is a list whose rows make no tensor: {error}. Of a tokenizer, ask for tensors of one "
                'length: tokenizer(texts, padding=True, truncation=True, return_tensors="pt").'
            ) from error
    # A collection of data sets, by the names of its splits, is a mapping too.
    raise ExtractError(
        f"data[{name!r}] is {tree.describe(column)}: a mapping gives columns, each a tensor, an array or a list with "
        f"one entry for each row. Where it holds several data sets, pass one of them: data[{name!r}]."
    )
