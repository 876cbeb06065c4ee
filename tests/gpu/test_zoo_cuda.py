"""Every layer of every model in the zoo on a GPU, held against bare hooks that clone in the same pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from tests.zoo import ZOO, Case
from torchhook.errors import NeverRanWarning

try:
    import pytest

    pytestmark = [
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        pytest.mark.slow,
    ]
except ImportError:  # tests.gpu runs without pytest too
    pass

MODES: tuple[Callable[[], AbstractContextManager[Any]], ...] = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in tensors, tuples, lists and dicts; what other classes hold is left to the tests on the CPU."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: moved(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(moved, value))
    return value


def cases() -> Iterator[Case]:
    for build in ZOO.values():
        try:
            case = build()
        except ImportError:  # a library that is not there
            continue
        lengths = {
            name: case.kwargs[name] for name in ("lengths",) if name in case.kwargs
        }  # which torch wants on the CPU
        yield case._replace(model=case.model.cuda(), args=moved(case.args), kwargs={**moved(case.kwargs), **lengths})


def same(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.is_quantized or one.layout != torch.strided or one.is_nested:
        return True  # none of these is in the zoo
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def wrong_values(
    case: Case, mode: Callable[[], AbstractContextManager[Any]], device: str | None
) -> tuple[list[str], int]:
    """The calls whose values differ from what bare hooks saw in the same pass, and how many there were."""
    seen: dict[str, list[list[Tensor]]] = {}
    first: dict[int, str] = {}
    handles = []
    for name, module in case.model.named_modules():
        if first.setdefault(id(module), name) == name:

            def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                seen.setdefault(name, []).append([tensor.detach().clone() for tensor in tensors(output)])

            handles.append(module.register_forward_hook(keep))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverRanWarning)
        with mode(), th.capture(case.model, device=device) as rec:
            case.model(*case.args, **case.kwargs)
    for handle in handles:
        handle.remove()
    wrong, total = [], 0
    for name, calls in seen.items():
        found = rec.all(name or "(model)")
        assert len(found) == len(calls), (case.name, name)
        for number, (value, true) in enumerate(zip(found, calls, strict=True)):
            total += 1
            kept = list(tensors(value))
            assert all(tensor.device.type == (device or tensor.device.type) for tensor in kept), (case.name, name)
            if len(kept) != len(true) or not all(map(same, kept, true)):
                wrong.append(f"{case.name}: {name}#{number}")
    return wrong, total


def test_no_value_of_any_model_is_wrong() -> None:
    wrong, total, ran = list[str](), 0, set[str]()
    # Inference mode last: what cuDNN remembers of a layer there, torch cannot use with gradients any more.
    for mode in MODES:
        for case in cases():
            try:
                with torch.no_grad():
                    case.model(*case.args, **case.kwargs)
            except Exception as error:  # by itself, without a hook: it mixes devices, or is for another version
                print(f"      {case.name} does not run there: {type(error).__name__}")
                continue
            ran.add(case.name)
            for device in (None, "cpu"):
                torch.manual_seed(1)
                found, values = wrong_values(case, mode, device)
                wrong, total = wrong + found, total + values
    print(f"      {len(wrong)} of {total:,} values wrong, {len(ran)} of {len(ZOO)} models")
    assert wrong == []
    assert ran
