"""``guard``: stop at the first NaN or Inf and name what made it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torchhook._callbacks import Fit, callback
from torchhook._core.index import Index
from torchhook._core.openable import Openable
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._guard.findings import Finding
from torchhook._guard.first_pass import FirstPass
from torchhook._guard.judge import Judge
from torchhook._guard.masks import Allow, Masks
from torchhook._guard.ranks import can_repeat_alone
from torchhook._guard.reduced import Reduced
from torchhook._guard.reports import Action, Reports
from torchhook._guard.thorough import Scrutiny, thorough_session
from torchhook._guard.watcher import Watcher
from torchhook._guard.word import Word
from torchhook._recording.address import Site
from torchhook._recording.tables import Table
from torchhook.errors import NeverRanWarning, warn

__all__ = ["Finding", "Guard", "guard"]

_Opened = tuple[Session, FirstPass | Watcher]


class Guard(Openable):
    """A guard on a model, for as long as it is open: a context manager, or ``open`` and ``close``."""

    _kind = "guard"

    def __init__(self, found: dict[Any, Finding], build: Callable[[], _Opened], word: Word) -> None:
        self._found = found
        self._word = word
        weakref.finalize(self, word.close)
        self._build: Callable[[], _Opened] | None = build
        self._session: Session | None = None
        self._watched: FirstPass | Watcher | None = None
        self._made()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one for each site, in the order found."""
        self._needs_opening("findings")
        return list(self._found.values())

    def callback(self) -> Any:
        """A callback for the trainer of Lightning or Hugging Face: the guard is open while it trains and validates.

        ``Trainer(callbacks=[th.guard(model).callback()])``. A guard that is open already stays open.
        """
        return callback(Fit(self))

    def _start(self) -> None:
        assert self._build is not None
        self._session, self._watched = self._build()
        self._word.open()
        self._session.open()

    def _stop(self, error: BaseException | None) -> None:
        session, watched = self._session, self._watched
        assert session is not None
        assert watched is not None
        try:
            watched.settle(error)
        finally:
            session.close()
            self._word.close()
            # Whoever keeps the guard for its findings keeps neither the model nor its last batch.
            self._session = self._build = self._watched = None
        # After an error the model may not have come to run, and the error says why.
        if error is None and not watched.runs:
            why = next(iter(session.recording.missing.values()), "the model has no module that runs.")
            warn(f"the guard saw nothing: {why}", NeverRanWarning)

    def __repr__(self) -> str:
        return (
            f"<guard, {self._state}>" if self._life == "made" else f"<guard, {self._state}: {len(self._found)} found>"
        )

    def table(self) -> Table:
        """What was found, a line each; a finding itself says more."""
        self._needs_opening("table()")
        rows = [[f.site.shown, f.phase, str(f.run), str(f.times), f.headline] for f in self.findings]
        return Table(repr(self)[1:-1], ["site", "pass", ">run", ">times", "found"] if rows else [], rows)

    def _repr_html_(self) -> str:
        # Before it is opened, there is no table; a notebook shows what a cell ends with all the same.
        table = Table(repr(self)[1:-1], [], []) if self._life == "made" else self.table()
        return table._repr_html_()


def guard(
    model: nn.Module,
    *,
    action: Action = "raise",
    backward: bool = True,
    allow: Allow | None = "-inf",
    exclude: Selector | None = None,
    thorough: bool = False,
) -> Guard:
    """Stop at the first NaN or Inf, forward or backward, and name what made it.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=-1), nn.Linear(2, 2))
    >>> _ = nn.init.constant_(model[0].bias, float("-inf"))
    >>> with guard(model, action="record") as g:
    ...     output = model(torch.ones(1, 2))
    >>> g.findings
    [<Finding: parameter '0.bias' already holds 2 -Inf; '0/linear#0' was the first to use it.>]

    It guards in a ``with`` block, or from ``open`` to ``close``, and does nothing before.

    Args:
        model: the model to guard; it computes what it would without a guard.
        action: ``"raise"`` raises a ``GuardError`` before the model, or ``backward``, returns; ``"warn"`` warns once
            for each site, ``"record"`` only fills ``findings``.
        backward: ``False`` leaves gradients alone: a loss scaler meets infinite ones on purpose.
        allow: ``"-inf"`` lets pass a ``-inf`` that the model writes down itself, or is given in a mask, and what adds
            to it; ``"inf"`` allows both signs, ``None`` neither. NaN, and infinities that come from finite numbers, are
            never allowed.
        exclude: what runs inside these modules or operations is not judged.
        thorough: ``True`` listens to every operation while it runs, which costs a fifth of the forward pass where
            layers are large, and several times as much as it where they are small or on a GPU.
            Otherwise only what modules return and the gradients of parameters are looked at, and the run is repeated
            when one of them is bad; a NaN that is made and masked inside one module is not seen.
    """
    if action not in ("raise", "warn", "record"):
        raise ValueError(f"action={action!r}: use 'raise', 'warn' or 'record'.")
    if allow not in ("-inf", "inf", None):
        raise ValueError(f"allow={allow!r}: use '-inf' (masks), 'inf' (both signs) or None.")
    # Selectors are resolved now, so that a wrong one is said here; hooks are made when the guard is opened.
    index = Index(model)
    excluded = [] if exclude is None else resolve(index, exclude)
    word = Word()
    reports = Reports(action, word)
    judge = Judge(index, Masks(allow), reports)
    scrutiny = Scrutiny(index, excluded, backward, judge)
    return Guard(judge.findings, functools.partial(_opened, scrutiny, thorough, reports), word)


def _opened(scrutiny: Scrutiny, thorough: bool, reports: Reports) -> _Opened:
    """The hooks of a guard, not yet on the model, and whom they tell."""
    if thorough or not can_repeat_alone(scrutiny.index):
        session, watcher = thorough_session(scrutiny)
        watcher.tell_of_passes(Reduced(session.scope, scrutiny).await_end)
        return session, watcher
    session = Session(scrutiny.index.given, index=scrutiny.index, warn=False)
    first_pass = FirstPass(session.scope, scrutiny, reports)
    session.listen(first_pass)
    session.look(Target(Site(""), scrutiny.index.root), lambda value, call: None)  # knows why the model never ran
    return session, first_pass
