"""``guard``: stop at the first NaN or Inf and name the place that made it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from torchhook._core.index import Index, is_callable
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._guard.backward import Follower
from torchhook._guard.findings import Finding
from torchhook._guard.judge import Judge
from torchhook._guard.masks import Allow, Allowed
from torchhook._guard.pending import Window
from torchhook._guard.watcher import Watcher
from torchhook._recording.address import Site
from torchhook.errors import GuardError, GuardWarning, NeverRanWarning

Action = Literal["raise", "warn", "record"]


class Guard:
    """A guard on a model, for as long as it is open: a context manager, or ``open`` and ``close``."""

    def __init__(self, session: Session, judge: Judge) -> None:
        self._session = session
        self._judge = judge

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one for each site, in the order found."""
        return list(self._judge.findings.values())

    def open(self) -> Guard:
        """Begin to watch."""
        self._session.open()
        return self

    def close(self) -> None:
        """Take every hook away. Closing twice does nothing."""
        self._close(quiet=False)

    remove = close

    def __enter__(self) -> Guard:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(quiet=error is not None)

    def _close(self, quiet: bool) -> None:
        if self._session.scope.closed:
            return
        self._session.close()
        missing = self._session.recording.missing
        if not quiet and len(missing) == len(self._session.sites):
            why = next(iter(missing.values()), "the model has no module that runs.")
            warnings.warn(f"the guard saw nothing: {why}", NeverRanWarning, stacklevel=3)

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
    """Stop at the first NaN or Inf, forward or backward, and name the place that made it.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=-1), nn.Linear(2, 2))
    >>> _ = nn.init.constant_(model[0].bias, float("-inf"))
    >>> with guard(model, action="record") as g:
    ...     output = model(torch.ones(1, 2))
    >>> g.findings[0].kind, str(g.findings[0].site)
    ('parameter', '0.bias')

    ``action="raise"`` raises a ``GuardError`` there and then, ``"warn"`` warns once for each site, ``"record"`` only
    fills ``findings``. ``allow="-inf"`` lets pass a ``-inf`` that the model writes down itself, or is given in a mask,
    and what adds to it: NaN, and infinities that come from finite numbers, are never allowed. ``"inf"`` allows both
    signs, ``None`` neither. ``backward=False`` leaves gradients alone: a loss scaler meets infinite ones on purpose.
    What runs inside ``exclude`` is not judged.
    """
    if action not in ("raise", "warn", "record"):
        raise ValueError(f"action={action!r}: use 'raise', 'warn' or 'record'.")
    if allow not in ("-inf", "inf", None):
        raise ValueError(f"allow={allow!r}: use '-inf' (masks), 'inf' (both signs) or None.")
    session = Session(model, warn=False)
    index = session.index
    targets = [] if exclude is None else resolve(index, exclude)
    excluded = {(id(t.module), t.site.op) for t in targets}
    spared = {id(module) for t in targets if t.site.op is None for module in t.module.modules()}
    judge = Judge(index, Allowed(allow), _reporter(action))
    window = Window(index, judge)
    parameters = functools.partial(_parameters, index, spared)
    follower = Follower(window, session.scope, session.handles, parameters, wanted=backward)
    watcher = Watcher(session.scope, judge, window, follower, excluded)
    session.listen(watcher)
    for module in index.distinct.values():
        if is_callable(module):
            site = Site(index.names(module)[0])
            session.look(Target(site.but(port="input"), module), _looker(watcher.given, module))
            session.look(Target(site, module), _looker(watcher.made, module))
    return Guard(session, judge)


def _parameters(index: Index, spared: set[int]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for path, (module, own) in index.tensors.items():
        parameter = module._parameters.get(own)
        if isinstance(parameter, nn.Parameter) and id(module) not in spared:
            yield path, module, parameter


def _looker(function: Callable[[nn.Module, Any, int], None], module: nn.Module) -> Look:
    def look(value: Any, call: int) -> None:
        with torch._C.DisableTorchFunction():  # or the listener would hear all of this
            function(module, value, call)

    return look


def _reporter(action: Action) -> Callable[[Finding], None]:
    def report(finding: Finding) -> None:
        if action == "raise":
            raise GuardError(finding)
        if action == "warn" and finding.times == 1:
            warnings.warn(str(finding), GuardWarning, stacklevel=2)

    return report
