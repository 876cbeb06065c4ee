"""Whose calls are seen."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator

import pytest

from tests.oracle import in_threads
from torchhook._core.scope import Scope, Stop, active


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope()
    scope.enter()
    yield scope
    scope.leave()


def test_scopes_are_entered_and_left_in_any_order() -> None:
    before = active.get()
    one, two = Scope(), Scope()
    one.enter()
    two.enter()
    one.leave()
    assert active.get() == before | {two}
    one.leave()
    two.leave()
    assert active.get() == before


def test_a_scope_is_not_seen_in_another_thread_and_is_seen_in_a_copied_context(scope: Scope) -> None:
    seen = in_threads(lambda: scope in active.get())
    contextvars.copy_context().run(lambda: seen.append(scope in active.get()))
    assert seen == [False, True]


def test_stop_is_no_exception_that_a_model_would_catch() -> None:
    assert not issubclass(Stop, Exception)
    assert Stop(scope := Scope()).scope is scope
