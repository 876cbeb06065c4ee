"""The operations that have sites, in the modules that have them: numbered among their like, edited and looked at."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, is_grad_enabled, nn

from torchhook import _torch
from torchhook._core import checkpointed
from torchhook._core.boundaries import EnterTap, LeaveTap
from torchhook._core.functional import BeginTap, EndTap, Listener, Recorder, made_here
from torchhook._core.hooks import Attachment
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.taps import OperationTap, Tap, as_arguments, as_value
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.rows import Rows
from torchhook._torch import graph_task, innermost_module, sharded
from torchhook.errors import SelectorError, SessionError


class _WholeTap(LeaveTap):
    """Says when a module has run, and before that, if it has not raised, that it has come to its end."""

    def __init__(self, function: Callable[[nn.Module], None], finish: Callable[[nn.Module], None]) -> None:
        super().__init__(function)
        self._finish = finish

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        try:
            if output is not None:
                self._finish(module)
        finally:
            super().__call__(module, args, output)


class SiteListener(Listener):
    """The operations that have sites, in the modules that have them; nothing else is looked at for long."""

    def __init__(self, scope: Scope | None, last: bool = False) -> None:
        super().__init__(scope, last)
        # By the id of the module and the name of the operation.
        self._inputs: dict[tuple[int, str], OperationTap] = {}
        self._outputs: dict[tuple[int, str], OperationTap] = {}
        self._modules: dict[int, nn.Module] = {}
        self._names: set[str] = set()
        self._recorded: dict[Callable[..., Any], str] = {}  # functions of these, where nothing is done but to record
        self._heard = False
        # Where "add(1)" is asked for.
        self._counted: set[tuple[int, str]] = set()
        self.totals: dict[tuple[int, str], set[int]] = {}
        """How often each of these came in whole calls of its module."""
        self._expected: dict[tuple[int, str], tuple[Site, Collection[int]]] = {}
        self._paths: dict[tuple[int, str], str] = {}
        self._changes = False
        self._followed: WeakSet[Any] = WeakSet()

    def opened(self) -> None:
        super().opened()
        self._changes = any(tap.edits or tap.aliases for tap in self.taps())
        self._recorded = {}

    def tap(self, module: nn.Module, site: Site, inward: bool, expected: Collection[int] = ()) -> OperationTap:
        """What the inputs or outputs of an operation in a module pass; how often it may come there, if that is known.

        Its place among its like says something only where there are as many of them as there were.
        """
        name = str(site.op)
        self._modules[id(module)] = module
        plain = _NUMBERED.sub("", name) if name.endswith(")") else name
        self._names.add(plain)
        self._paths[id(module), plain] = site.path
        if expected:
            self._expected[id(module), plain] = site, expected
        if plain != name or expected:
            self._counted.add((id(module), plain))
        return (self._inputs if inward else self._outputs).setdefault((id(module), name), OperationTap(site.path))

    def record(
        self, target: Target, keep: Keep, rows: Rows, order: Iterator[int], expected: Collection[int]
    ) -> OperationTap | None:
        """The tap of an output that is to be recorded, as ``tap`` makes it; ``None`` where it records already."""
        site, module, _ = target
        name, key = str(site.op), id(module)
        if (key, name) in self._outputs or expected or name.endswith(")"):
            tap = self.tap(module, site, False, expected)
            if tap.keep is not None:  # under another of its names
                return None
        else:  # as nearly always: on one level, for there may be one in each block of a model
            tap = self._outputs[key, name] = OperationTap(site.path)
            self._modules[key] = module
            self._names.add(name)
            self._paths[key, name] = site.path
        tap.record(keep, rows, order)
        return tap

    def taps(self) -> Iterator[OperationTap]:
        yield from self._inputs.values()
        yield from self._outputs.values()

    def attach(self, attachment: Attachment, index: Index) -> None:
        if id(index.root) not in self._modules:
            attachment.attach(EnterTap(self._begin), index.root)
        if self._counted or self._changes:
            enter: EnterTap = EnterTap(self.enter)
            leave: LeaveTap = _WholeTap(self.leave, self._finish)
        else:  # what these come to then, without the calls
            enter, leave = BeginTap(self), EndTap(self)
        attachment.attach_between(enter, self._modules.values(), leave)

    @property
    def _counts(self) -> dict[int, list[Counter[str]]]:
        return self._place.counts

    def _begin(self, model: nn.Module) -> None:
        """The model is called, so none of its modules runs: what is there was left by an interrupt."""
        if self._running and not self._gate.is_foreign() and _torch.times_running(model) < 2:
            self.unwind(0)

    def enter_running(self, model: nn.Module) -> None:
        if id(model) in self._modules:
            self.enter(model)

    def where(self, function: Callable[..., Any], name: str) -> nn.Module | None:
        """As said there; modules without hooks, which run inside of those that have sites, are found on the stack.

        Until the first of the operations is heard, all others are taken down too: if it never comes, that tells what
        could have been asked for.
        """
        if name not in self._names and self._heard:
            self.ignored.add(function)
            return None
        if name in self._names and not (self._counted or self._inputs or self._changes):
            self._recorded[function] = name
        current = self._running[-1] if self._running else None
        module = innermost_module()
        # In a module with hooks that is not the current one, other hooks run: it has not begun, or has ended.
        return current if module is None or id(module) in self._modules else module

    def enter(self, module: nn.Module) -> None:
        super().enter(module)
        if self._changes and graph_task() == -1:
            self._gate.note_segments(0)  # which may be recomputed on a thread of autograd's
        if self._counted:
            self._counts.setdefault(id(module), []).append(Counter())

    @contextlib.contextmanager
    def hearing_again(self, module: nn.Module, counts: Counter[str]) -> Iterator[None]:
        open_ = self._counts.setdefault(id(module), [])
        open_.append(counts.copy())
        try:
            with super().hearing_again(module, counts):
                yield
        finally:
            open_.pop()

    def _follow(self, module: nn.Module, name: str) -> None:
        """See to it that what a checkpoint runs is heard again, if the running operation is one of a function in it."""
        # Every checkpoint runs without gradients, or with hooks on what autograd saves: nothing else is looked at.
        if is_grad_enabled() and _torch.saved_tensor_hooks() is None:
            return
        self._gate.note_segments(0)
        counts = self._counts.get(id(module))
        if not checkpointed.follow(self, module, counts[-1].copy() if counts else Counter(), self._followed):
            raise SessionError(
                f"{self._paths[id(module), name]}/{name} cannot be edited here: it runs in a checkpointed function "
                "that is no module, and this torch does not let TorchHook hear when that is recomputed. Checkpoint a "
                "module instead, or edit a module's output."
            )

    def leave(self, module: nn.Module) -> None:
        super().leave(module)
        if self._counted and (counts := self._counts.get(id(module))):
            counts.pop()

    def _finish(self, module: nn.Module) -> None:
        """A call of a module is over, and it was not left by an exception."""
        if not self._counts.get(id(module)):
            return
        for key in self._counted:
            if key[0] == id(module):
                total = self._counts[id(module)][-1][key[1]]
                self.totals.setdefault(key, set()).add(total)
                site, expected = self._expected.get(key, (None, ()))
                if site is not None and total and total not in expected:
                    known = " or ".join(map(str, sorted(expected)))
                    raise SelectorError(
                        f"{site.shown!r} was shown to be {site.but(role='').shown!r} where {key[1]} runs {known} times "
                        f"in a call of that module, and now it ran {total} times, so that it may be another one: call "
                        "th.roles(model, inputs) with inputs like these first."
                    )

    def unwind(self, depth: int) -> None:
        super().unwind(depth)
        if not depth:
            self._counts.clear()

    def before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._changes and (id(module), name) in self._paths:
            self._follow(module, name)
        for tap in self._taps_of(self._inputs, module, name) if self._inputs else ():
            passing = as_value(args, kwargs)
            value = tap.take(passing)
            if value is not passing:
                args, kwargs = as_arguments(value)
        return args, kwargs

    def recorder(self, function: Callable[..., Any]) -> Recorder | None:
        name = self._recorded.get(function)
        if name is None or not (running := self._place.running):
            return None
        module = running[-1]
        tap = self._outputs.get((id(module), name))
        if tap is None or not tap.only_records or innermost_module() is not module or sharded.is_moving_weights(module):
            return None
        self._heard = True
        return tap.put

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = None if self._counted else self._outputs.get((id(module), name))
        if known is not None and known.only_records:
            self._heard = True
            known.put(output, made_here())
            return output
        super().after(name, module, output, args, kwargs)
        for tap in self._taps_of(self._outputs, module, name):
            output = self._taken(tap, output, args, kwargs)
        if (id(module), name) in self._counted and (counts := self._counts.get(id(module))):
            counts[-1][name] += 1
        return output

    def _taps_of(self, taps: dict[tuple[int, str], OperationTap], module: nn.Module, name: str) -> list[OperationTap]:
        """Those of an operation, and of its place among its like in this call of the module."""
        found = [tap] if (tap := taps.get((id(module), name))) is not None else []
        if (id(module), name) in self._counted and (counts := self._counts.get(id(module))):
            numbered = taps.get((id(module), f"{name}({counts[-1][name]})"))
            found += [numbered] if numbered is not None else []
        self._heard = self._heard or bool(found)
        return found

    def _taken(self, tap: Tap, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = tap.take(output, (args, kwargs))
        written = kwargs.get("out", args[0] if args else None)
        if value is not output and output is written and isinstance(output, Tensor) and tap.edits:
            # The model may go on with the tensor that was written to, and not with what the operation returns.
            return output.copy_(value)
        return value


_NUMBERED = re.compile(r"\([0-9]+\)$")
