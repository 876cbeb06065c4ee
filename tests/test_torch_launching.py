"""A compiled kernel is launched as Triton itself does it, or not at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torchhook._torch import launching


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda device: ("stream", device))
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=runtime))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)  # type: ignore[arg-type]
    monkeypatch.setattr(launching, "trusted", [True])


def test_a_kernel_is_run_on_the_current_stream_with_the_arguments_in_their_order(triton: None) -> None:
    calls: list[Any] = []
    kernel = SimpleNamespace(run=lambda *args: calls.append(args), function="f", packed_metadata="m")
    launch = launching.launcher(kernel, 1, (7, True))
    assert launch is not None
    launch(3, 16, 32, 48)
    assert calls == [(3, 1, 1, ("stream", 1), "f", "m", None, None, None, 16, 32, 48, 7, True)]


def test_what_is_no_such_kernel_or_was_wrong_before_is_not_launched(triton: None) -> None:
    assert launching.launcher(None, 0, ()) is None
    launching.trusted[0] = False
    kernel = SimpleNamespace(run=print, function="f", packed_metadata="m")
    assert launching.launcher(kernel, 0, ()) is None
