"""The watch on a GPU: the numbers of numpy, one launch for each value, and no wait before the next step has run."""

from __future__ import annotations

import importlib.util
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.watch.tensors import TENSORS, by_numpy, randn
from torchhook._watch import rows as rows_of
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook._watch.ledger import Ledger, norm_at
from torchhook._watch.rows import Rows, works

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass

WIDTHS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_where_triton_is_its_kernels_are_used() -> None:
    if importlib.util.find_spec("triton") is not None:
        assert [works(device(), dtype) for dtype in WIDTHS] == [True] * 4


def test_rows_hold_the_statistics_of_numpy() -> None:
    if not works(device(), torch.float32):
        return
    wrong = []
    for name in TENSORS:
        tensor = TENSORS[name](randn(3, 5, 7, 9).cuda())
        fields, size, array = by_numpy(tensor)
        rows = Rows(device())
        found = [rows.statistics(tensor), *(rows.statistics(tensor, unit) for unit in range(tensor.dim()))]
        norm = rows.norm(tensor)
        whole, norms, live = rows.read([part.cpu() for part in rows.sent()])
        right = np.allclose(whole, [fields] * len(found), rtol=1e-9, atol=0, equal_nan=True)
        right &= np.allclose(norms[norm.at], size, rtol=1e-12, atol=0, equal_nan=True)
        for unit, row in enumerate(found[1:]):
            others = tuple(dim for dim in range(array.ndim) if dim != unit)
            right &= not row.units or row.flags(live).tolist() == (array != 0).any(axis=others).tolist()
        if not right:
            wrong.append((name, whole, fields))
    assert wrong == []


def test_large_tensors_in_both_memory_orders_are_as_exact_as_small_ones() -> None:
    if not works(device(), torch.float32):
        return
    torch.manual_seed(0)
    x = torch.randn(32, 64, 112, 112, device="cuda").relu_()
    x[:, 7] = 0
    for tensor in (x, x.to(memory_format=torch.channels_last), x.bfloat16(), x[:, :, :49, :1].contiguous(), x[..., 1:]):
        rows = Rows(device())
        row, norm = rows.statistics(tensor, 1), rows.norm(tensor)
        whole, norms, live = rows.read([part.cpu() for part in rows.sent()])
        wide = tensor.double()
        expected = [wide.mean(), wide.var(correction=0), wide.min(), wide.max(), (wide != 0).sum(), wide.isnan().sum()]
        assert np.allclose(whole[row.at], [float(number) for number in expected], rtol=1e-10, atol=0)
        assert np.allclose(norms[norm.at], float(wide.norm()), rtol=1e-10)
        assert not row.units or row.flags(live).tolist() == [channel != 7 for channel in range(64)]


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(3 if i == 0 else 16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def trained(model: nn.Module, x: torch.Tensor, steps: int = 3, **options: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, **options) as w:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
    return [(shot.step, shot.sites) for shot in w.history]


def assert_same(found: list[Any], expected: list[Any], rel: float) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, sites), (_, others) in zip(found, expected, strict=True):
        assert sites.keys() == others.keys()
        for site, values in sites.items():
            assert values.keys() == others[site].keys()
            for name, value in values.items():
                slack = rel * max(1.0, abs(others[site].get("max", 0.0)))
                assert math.isclose(value, others[site][name], rel_tol=rel, abs_tol=slack), (site, name)


def test_the_numbers_are_those_of_the_plain_way() -> None:
    x = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(0)).cuda()
    for options in ({}, {"every": 2}, {"statistics": ["mean", "zeros"]}):
        found = trained(cnn().cuda(), x, **options)
        really, rows_of.works = rows_of.works, lambda device, dtype: False  # type: ignore[assignment]
        try:
            expected = trained(cnn().cuda(), x, **options)
        finally:
            rows_of.works = really
        assert_same(found, expected, rel=2e-3)  # convolutions choose their ways anew, and the steps amplify it


def test_autocast_and_channels_last_are_measured_in_place() -> None:
    if not works(device(), torch.bfloat16):
        return
    model = cnn().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 20, 20, device="cuda").to(memory_format=torch.channels_last)
    kept = {}
    model[2].register_forward_hook(lambda m, a, out: kept.update(out=out.detach().clone()))
    with torch.autocast("cuda", dtype=torch.bfloat16), watch(model, alarms=False) as w:
        model(x).float().sum().backward()
    wide = kept["out"].double()
    assert math.isclose(w.last["2"]["mean"], float(wide.mean()), rel_tol=1e-9)
    assert math.isclose(w.last["2"]["std"], float(wide.std(correction=0)), rel_tol=1e-9)


def kernels_of(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if "cudaLaunch" in event.key or "cuLaunch" in event.key)


def test_a_watched_step_launches_few_kernels_for_each_value() -> None:
    if not works(device(), torch.float32):
        return
    model, x = cnn().cuda(), torch.randn(4, 3, 20, 20, device="cuda")
    values, parameters = len(model), len(list(model.parameters()))

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(3):
        step()
    plain = kernels_of(step)
    with watch(model):
        for _ in range(3):
            step()
        seen = kernels_of(step)
    assert seen - plain <= 2 * values + parameters + 40


def test_nothing_is_waited_for_from_one_step_to_the_next() -> None:
    model, x = cnn().cuda(), torch.randn(4, 3, 20, 20, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    told: list[int] = []

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with watch(model, log=lambda number, values: told.append(number)) as w:
        for _ in range(3):
            step()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(3):
                step()
            torch.cuda.set_sync_debug_mode("default")
        assert [w for w in seen if "called a synchronizing" in str(w.message)] == []
        assert told in ([0, 1, 2, 3], [0, 1, 2])  # and the newest that has ended, when it is asked for
        assert [shot.step for shot in w.history] == [0, 1, 2, 3, 4]
    assert told == [0, 1, 2, 3, 4, 5]


def test_dead_units_are_named_on_a_gpu() -> None:
    model = cnn().cuda()
    with torch.no_grad():
        model[1].bias[3] = -100.0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with watch(model, "2", gradients=False, parameters=False, alarms=Alarms(window=2)) as w:
            for _ in range(2):
                model(torch.randn(4, 3, 20, 20, device="cuda"))
    assert w.last["2"]["dead"] == 1 / 16
    assert ["(units 3)" in str(w.message) for w in seen] == [True]


def test_without_triton_the_numbers_come_all_the_same() -> None:
    really, rows_of.works = rows_of.works, lambda device, dtype: False  # type: ignore[assignment]
    try:
        ledger = Ledger()
        key = ledger.norm(torch.tensor([3.0, 4.0], device="cuda"))
        assert math.isclose(norm_at(key, ledger.read()), 5.0, rel_tol=1e-6)
    finally:
        rows_of.works = really
