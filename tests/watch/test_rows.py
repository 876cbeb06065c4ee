"""Statistics in rows of one buffer: who looks at which elements, what comes of it, and what is done without Triton."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.watch.emulated import TILE, Kernels, emulated  # noqa: F401
from tests.watch.tensors import TENSORS, by_numpy, randn
from torchhook._watch import rows as rows_of
from torchhook._watch.plans import flat_layout, unit_layout
from torchhook._watch.rows import Rows, in_memory, works

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TENSORS)
def test_rows_hold_the_statistics_of_numpy(name: str, emulated: Kernels) -> None:  # noqa: F811
    tensor = TENSORS[name](randn(3, 5, 7, 9))
    expected, size, array = by_numpy(tensor)
    rows = Rows(CPU)
    found = [rows.statistics(tensor), *(rows.statistics(tensor, unit) for unit in range(tensor.dim()))]
    norm = rows.norm(tensor)
    whole, norms, live = rows.read(rows.sent())
    for row in found:
        np.testing.assert_allclose(whole[row.at], expected, rtol=1e-9)
    np.testing.assert_allclose(norms[norm.at], size, rtol=1e-12)
    assert emulated.look.launches == tensor.dim() + 2
    for unit, row in enumerate(found[1:]):
        if row.units:
            others = tuple(dim for dim in range(array.ndim) if dim != unit)
            assert row.flags(live).tolist() == (array != 0).any(axis=others).tolist()


def test_units_are_looked_at_in_the_same_pass_in_both_memory_orders(emulated: Kernels) -> None:  # noqa: F811
    x = randn(4, 6, 5, 5)
    for tensor in (x, x.to(memory_format=torch.channels_last), x.bfloat16(), randn(64, 32)):
        assert Rows(CPU).statistics(tensor, 1).units == tensor.shape[1]
    assert Rows(CPU).statistics(x > 0, 1).units == 0  # turned into others first: the order is gone


def test_rows_of_many_tensors_do_not_mix_and_the_buffer_grows(emulated: Kernels) -> None:  # noqa: F811
    tensors = [randn(size) + size for size in range(1, 4000, 37)]
    for room in ((0, 0, 0), (7, 3, 0), (100_000, 100_000, 16)):
        rows = Rows(CPU, room)
        found = [(rows.statistics(tensor), rows.norm(tensor)) for tensor in tensors]
        whole, norms, _ = rows.read(rows.sent())
        np.testing.assert_allclose(whole[[row.at for row, _ in found]], [by_numpy(t)[0] for t in tensors])
        np.testing.assert_allclose(norms[[row.at for _, row in found]], [by_numpy(t)[1] for t in tensors])
        assert rows.room[0] == sum(row.slots for row, _ in found)


@pytest.mark.parametrize("numel", [1, 5, 1024, 1025, 70_000, 51_380_224, 2**29 - 1])
@pytest.mark.parametrize("most", [64, 660])
def test_programs_share_all_elements_and_none_is_left_without(numel: int, most: int) -> None:
    layout = flat_layout(numel, most, TILE)
    assert layout.programs <= most
    assert (layout.programs - 1) * layout.length < numel <= layout.programs * layout.length
    assert layout.length % 16 == 0  # or loads would not be those of whole vectors
    assert layout.length // TILE <= 65_535  # what a thread counts in 16 bits


@pytest.mark.parametrize(
    ("shape", "unit"), [((64, 64, 112, 112), 1), ((64, 2048, 7, 7), 1), ((64, 56, 56, 64), 3), ((8, 5), 1)]
)
def test_programs_share_all_rows(shape: tuple[int, ...], unit: int) -> None:
    layout = unit_layout(shape, unit, 396, TILE)
    assert layout.rows * layout.length == math.prod(shape)
    assert layout.programs <= 396
    assert (layout.programs - 1) * layout.rows_each < layout.rows
    assert layout.tile[0] * layout.tile[1] == TILE


def test_few_long_rows_are_shared_by_many_programs_and_their_units_are_left_to_others(emulated: Kernels) -> None:  # noqa: F811
    row = Rows(CPU).statistics(randn(1, 2, 300_000), 1)
    assert row.units == 0
    assert row.slots > 32


def test_memory_without_gaps_is_read_where_it_is() -> None:
    x = randn(2, 3, 4, 5, 6)
    for tensor in (x, x.to(memory_format=torch.channels_last_3d), x.permute(4, 1, 0, 3, 2), x[1:]):
        dense, order = in_memory(tensor)
        assert dense is tensor
        assert order is not None
        assert tensor.permute(order).is_contiguous()
    dense, _ = in_memory(x[:, ::2])
    assert dense.is_contiguous()


def test_a_triton_that_is_missing_or_wrong_is_not_used_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
    emulated: Kernels,  # noqa: F811
) -> None:
    works.cache_clear()
    assert works(CPU, torch.float32)
    works.cache_clear()

    def fail(*args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(type(emulated.look), "__getitem__", fail)
    assert not works(CPU, torch.float32)
    works.cache_clear()
    monkeypatch.setattr(type(emulated.look), "__getitem__", lambda self, grid: lambda *args, **constants: None)
    assert not works(CPU, torch.float32)


def test_tensors_on_the_cpu_have_no_rows() -> None:
    assert not rows_of.has_rows(torch.ones(3))
