"""``guard``: stop at the first NaN or Inf and name what made it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn

from torchhook import _torch
from torchhook._callbacks import Fit, callback
from torchhook._core.index import Index, is_callable
from torchhook._core.openable import Openable
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._guard.backward import BackwardWatcher
from torchhook._guard.findings import Finding
from torchhook._guard.judge import Judge
from torchhook._guard.masks import Allow, Masks
from torchhook._guard.pending import Pending
from torchhook._guard.watcher import Watcher
from torchhook._guard.word import Word
from torchhook._recording.address import Site
from torchhook.errors import GuardError, GuardWarning, NeverRanWarning, warn

__all__ = ["Finding", "Guard", "guard"]

Action = Literal["raise", "warn", "record"]


class Guard(Openable):
    """A guard on a model, for as long as it is open: a context manager, or ``open`` and ``close``."""

    _kind = "guard"

    def __init__(self, found: dict[Any, Finding], build: Callable[[], Session], word: Word) -> None:
        self._found = found
        self._word = word
        weakref.finalize(self, word.close)
        self._build: Callable[[], Session] | None = build
        self._session: Session | None = None
        self._made()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one for each site, in the order found."""
        return list(self._found.values())

    def callback(self) -> Any:
        """A callback for the trainer of Lightning or Hugging Face: the guard is open while it trains and validates.

        ``Trainer(callbacks=[th.guard(model).callback()])``. A guard that is open already stays open.
        """
        return callback(Fit(self))

    def _start(self) -> None:
        assert self._build is not None
        self._session = self._build()
        self._word.open()
        self._session.open()

    def _stop(self, error: BaseException | None) -> None:
        session = self._session
        assert session is not None
        session.close()
        self._word.close()
        # Whoever keeps the guard for its findings keeps neither the model nor its last batch.
        self._session = self._build = None
        missing = session.recording.missing
        # After an error the model may not have come to run, and the error says why.
        if error is None and len(missing) == len(session.sites):
            why = next(iter(missing.values()), "the model has no module that runs.")
            warn(f"the guard saw nothing: {why}", NeverRanWarning)

    def __repr__(self) -> str:
        return f"<guard: {len(self.findings)} found>"


def guard(
    model: nn.Module,
    *,
    action: Action = "raise",
    backward: bool = True,
    allow: Allow | None = "-inf",
    exclude: Selector | None = None,
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
        action: ``"raise"`` raises a ``GuardError`` there and then, ``"warn"`` warns once for each site, ``"record"``
            only fills ``findings``.
        backward: ``False`` leaves gradients alone: a loss scaler meets infinite ones on purpose.
        allow: ``"-inf"`` lets pass a ``-inf`` that the model writes down itself, or is given in a mask, and what adds
            to it; ``"inf"`` allows both signs, ``None`` neither. NaN, and infinities that come from finite numbers, are
            never allowed.
        exclude: what runs inside these modules or operations is not judged.
    """
    if action not in ("raise", "warn", "record"):
        raise ValueError(f"action={action!r}: use 'raise', 'warn' or 'record'.")
    if allow not in ("-inf", "inf", None):
        raise ValueError(f"allow={allow!r}: use '-inf' (masks), 'inf' (both signs) or None.")
    # Selectors are resolved now, so that a wrong one is said here; hooks are made when the guard is opened.
    index = Index(model)
    excluded = [] if exclude is None else resolve(index, exclude)
    word = Word()
    judge = Judge(index, Masks(allow), _reporter(action, word))
    return Guard(judge.findings, functools.partial(_session, index, excluded, backward, judge), word)


def _session(index: Index, excluded: list[Target], backward: bool, judge: Judge) -> Session:
    """The hooks of a guard, not yet on the model."""
    session = Session(index.modules[""], index=index, warn=False)
    # The gradients of an excluded module's parameters are left alone too; an excluded operation has none of its own.
    spared = {id(module) for t in excluded if t.site.op is None for module in t.module.modules()}
    pending = Pending(index, judge)
    parameters = functools.partial(_parameters, index, spared)
    gradients = BackwardWatcher(pending, session.scope, session.handles, parameters, enabled=backward)
    watcher = Watcher(session.scope, judge, pending, gradients, {(id(t.module), t.site.op) for t in excluded})
    session.listen(watcher)
    for module in index.distinct.values():
        if is_callable(module):
            site = Site(index.names(module)[0])
            session.look(Target(site.but(port="input"), module), _quietly(watcher.module_called, module))
            session.look(Target(site, module), _quietly(watcher.module_returned, module))
    return session


def _parameters(index: Index, spared: set[int]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for path, (module, own) in index.tensors.items():
        parameter = module._parameters.get(own)
        if isinstance(parameter, nn.Parameter) and id(module) not in spared:
            yield path, module, parameter


def _quietly(function: Callable[[nn.Module, Any, int], None], module: nn.Module) -> Look:
    def look(value: Any, call: int) -> None:
        with _torch.unheard():  # or the listener would hear all of this
            function(module, value, call)

    return look


def _reporter(action: Action, word: Word) -> Callable[[Finding], None]:
    def report(finding: Finding) -> None:
        if action == "raise":
            finding.note = word.leave(repr(finding))
            raise GuardError(finding)
        if action == "warn" and finding.times == 1:
            warn(str(finding), GuardWarning)

    return report
