"""Rows that are filled again by the next step: the numbers are those of each step, whatever it shows."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.oracle import BareHooks, copies
from tests.watch.emulated import Kernels, emulated  # noqa: F401
from tests.watch.helpers import assert_close, by_numpy
from tests.watch.tensors import by_numpy as numbers_of
from torchhook._watch.api import watch
from torchhook._watch.places import Places
from torchhook._watch.rows import NORM, Rows

CPU = torch.device("cpu")


class Moody(nn.Module):
    """Skips a layer, calls others several times, and returns what has gaps or lies elsewhere, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe, self.relu, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        self.odd = Odd()
        self.times, self.skips = 1, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.relu(x) - 0.5
        return self.last(self.odd(x if self.skips else self.maybe(x)))


class Odd(nn.Module):
    mood = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.mood == 1:
            return torch.stack([x, x * 2], -1)[..., 1]  # with gaps
        if self.mood == 2:
            return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)  # at an address that is not aligned
        return x * 2


def gradients(model: Moody, x: Tensor) -> dict[str, float]:
    """The norms of what flows back to the outputs of layers that run once, by bare tensor hooks."""
    found: dict[str, float] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: found.update({name: float(grad.double().norm())}))

        return hook

    handles = [getattr(model, name).register_forward_hook(listen(name)) for name in ("first", "maybe", "last")]
    model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    return found


MOODS: list[dict[str, Any]] = [
    *([{}] * 4),
    {"times": 3},
    {"times": 3},
    {"times": 3},
    {"skips": True},
    {"skips": True},
    {},
    {"rows": 7},
    {"rows": 7},
    {"mood": 1},
    {"mood": 2},
    *([{"mood": 2}] * 3),
    {},
    {"dtype": torch.float64},
    *([{"dtype": torch.float64}] * 3),
    *([{}] * 4),
]


def test_every_step_has_its_own_numbers_whatever_it_shows(emulated: Kernels) -> None:  # noqa: F811
    torch.manual_seed(0)
    model, expected = Moody(), []
    with watch(model, alarms=False) as w:
        for mood in MOODS:
            model.times, model.skips = mood.get("times", 1), mood.get("skips", False)
            model.odd.mood = mood.get("mood", 0)
            model.to(mood.get("dtype", torch.float32))
            x = torch.randn(mood.get("rows", 3), 6, dtype=mood.get("dtype", torch.float32))
            with w.paused():
                grads = gradients(model, x)
                with BareHooks(model) as bare:
                    model(x)
            values = {
                site: by_numpy([c.tensor for frozen in calls for c in copies(frozen)])
                for site, calls in bare.outputs.items()
                if site
            }
            expected.append((values, grads))
            model(x).square().sum().backward()
    assert len(w.history) == len(MOODS)
    for shot, (values, grads) in zip(w.history, expected, strict=True):
        assert {site for site in shot.sites if site in model.__dict__["_modules"]} == set(values)
        for site, numbers in values.items():
            assert_close(shot.sites[site], numbers, site)
        for site, norm in grads.items():
            assert shot.sites[site]["grad_norm"] == pytest.approx(norm, rel=1e-5), (shot.step, site)


def test_steps_that_are_alike_fill_the_same_rows_without_taking_any(emulated: Kernels) -> None:  # noqa: F811
    model, taken = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), []
    with watch(model, alarms=False) as w:
        for _ in range(8):
            model(torch.randn(2, 3)).square().sum().backward()
            taken.append([rows.is_arranging for rows in w._engine.step.ledger.rows.values()])
    assert taken[4:] == [[False]] * 4


def arranged(*tensors: Tensor) -> tuple[Rows, list[Places]]:
    """Rows that are to be filled again by tensors like these, and where they go: each as a whole, and its norm."""
    plans = Rows(CPU)
    for tensor in tensors:
        plans.statistics(tensor)
        plans.norm(tensor)
    rows, places = Rows(CPU, plans=plans.plans), [Places() for _ in tensors]
    for tensor, place in zip(tensors, places, strict=True):
        assert place.fill({CPU: rows}, tensor, None, 0) is not None
        assert place.fill({CPU: rows}, tensor, NORM, 1) is not None
    again = rows.arranged()
    assert again is not None
    return Rows(CPU, again.room, rows.plans, again), places


def test_rows_that_are_filled_again_hold_the_statistics_of_numpy_and_unfilled_ones_disturb_none(
    emulated: Kernels,  # noqa: F811
) -> None:
    rows, (one, _, other) = arranged(torch.randn(5, 3), torch.randn(9000), torch.randn(2, 2).double())
    first, last, more = torch.randn(5, 3), torch.randn(2, 2).double(), torch.randn(4000)
    found = [one.fill({CPU: rows}, first, None, 0), other.fill({CPU: rows}, last, None, 0)]
    found.append(rows.statistics(more))
    sizes = [other.fill({CPU: rows}, last, NORM, 1)]
    table, norms, _ = rows.read(rows.sent())
    assert [row.at for row in found] == [0, 2, 3]
    for row, tensor in zip(found, (first, last, more), strict=True):
        np.testing.assert_allclose(table[row.at], numbers_of(tensor)[0], rtol=1e-9)
    np.testing.assert_allclose(norms[sizes[0].at], float(last.norm()))
    assert rows.arranged() is rows.arrangement  # what has no place of its own does not count


def test_a_row_is_filled_once_in_a_step_and_by_nothing_unlike_it(emulated: Kernels) -> None:  # noqa: F811
    x = torch.randn(4, 4)
    unlike = [x.double(), x.t(), x[:2], torch.randn(5).narrow(0, 1, 4), x.to_sparse(), torch.randn(4, 4).cfloat().imag]
    for tensor in unlike:
        rows, (places,) = arranged(x)
        row = places.fill({CPU: rows}, tensor, None, 0)
        assert row is None or row.at == 1
        assert rows.arranged() is None or row is None
    rows, (places,) = arranged(x)
    assert [places.fill({CPU: rows}, x, None, 0).at for _ in range(3)] == [0, 1, 2]
    assert places.fill({}, x, None, 0) is None


def test_threads_never_fill_the_same_row(emulated: Kernels) -> None:  # noqa: F811
    tensors = [torch.full((4, 4), float(i)) for i in range(8)]
    for _ in range(20):
        rows, (places,) = arranged(tensors[0])
        found: list[Any] = []
        barrier = threading.Barrier(len(tensors))

        def fill(tensor: Tensor, rows: Rows, places: Places, found: list[Any], barrier: threading.Barrier) -> None:
            barrier.wait()
            found.append((float(tensor[0, 0]), places.fill({CPU: rows}, tensor, None, 0)))

        threads = [threading.Thread(target=fill, args=(t, rows, places, found, barrier)) for t in tensors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        table = rows.read(rows.sent())[0]
        assert {table[row.at][0] for _, row in found} == set(range(8))
        assert all(table[row.at][0] == value for value, row in found)
