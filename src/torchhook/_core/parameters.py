"""The gradients of parameters: as autograd hands them over, or as they are once the ranks have put theirs together.

Under DDP a tensor hook sees what this rank's batch gave, before the reduction; under FSDP it sees nothing at all,
because autograd meets another tensor. What the optimizer will see is in ``.grad`` when the pass has ended: edits are
made there, and ``gather="full"`` reads there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook._core.gradients import GradTap
from torchhook._core.hooks import Attachment, after_backward
from torchhook._core.ranks import Together
from torchhook._core.sharding import Home, Homes
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._torch.memory import version_of


class ParameterGradients:
    """Has the gradients of parameters told to their taps."""

    def __init__(self, homes: Homes, together: Together | None, reduced: bool) -> None:
        self._homes = homes
        self._always_reduced = reduced
        self._full = together is not None
        self._together = together
        self._reduced: list[_Reduced] = []
        self._passed: set[int] = set()
        self._heard: set[int] = set()
        self._ended = AfterBackward()

    def follow(self, target: Target, tap: GradTap, attachment: Attachment) -> Tensor:
        """Wait for the gradients of a parameter; returns the one that is there between steps."""
        assert target.tensor is not None
        home = self._homes.of(target.module, target.tensor)
        assert home is not None
        after = bool(tap.edits) or self._full or self._always_reduced
        if home.way == "own" or (home.way == "replicated" and not after):
            attachment.follow(home.parameter, tap.arrived_at_parameter)
            return home.parameter
        reduced = _Reduced(home, tap, target.site)
        self._reduced.append(reduced)
        if home.way == "flat" and home.groups and tap.edits:
            self._announce(attachment)
        mark = functools.partial(_mark, reduced, self._ended, self._deliver)
        if home.way == "replicated":
            attachment.follow(home.leaf, mark)
            self._hear_all(home, attachment)
        else:
            attachment.follow_accumulated(home.leaf, mark)
        return home.parameter

    def _hear_all(self, home: Home, attachment: Attachment) -> None:
        """Hear of each pass of what replicates a parameter, also of one in which this rank does not use it."""
        if home.may_be_unused and id(home.unit) not in self._heard:
            self._heard.add(id(home.unit))
            passes = functools.partial(_mark_unit, id(home.unit), self._passed, self._ended, self._deliver)
            for other in self._homes:
                if other.unit is home.unit:
                    attachment.follow(other.leaf, passes)

    def _announce(self, attachment: Attachment) -> None:
        if self._together is None:
            self._together = Together("edited gradients")
            attachment.defer(self._together.close)
            self._together.open()

    def _deliver(self) -> None:
        # In the order of the sites, which is the same on all ranks; that in which gradients arrive may not be.
        for reduced in self._reduced:
            # A rank that did not use a parameter gets the gradient of those that did.
            came = reduced.arrived or (id(reduced.home.unit) in self._passed and reduced.is_written)
            reduced.arrived = False
            if came and reduced.home.is_reduced:
                self._take(reduced)
            reduced.note()
        self._passed.clear()

    def _take(self, reduced: _Reduced) -> None:
        home, tap = reduced.home, reduced.tap
        parameter = home.parameter
        # A piece without elements has no gradient.
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        whole = home.way == "flat" and (self._full or bool(tap.edits))
        if (whole or self._full) and self._together is not None:
            self._together.need(home.groups, repr(reduced.site.shown))
        with torch.no_grad():
            new = tap.arrived_at_parameter(home.whole(grad) if whole else grad)
            if new is not None:
                # In place: buckets of DDP and flat gradients of FSDP are views of larger memory.
                grad.copy_(home.piece(new, grad) if whole else new)


class _Reduced:
    """A parameter whose gradient is read when it has been reduced."""

    def __init__(self, home: Home, tap: GradTap, site: Site) -> None:
        self.home, self.tap, self.site = home, tap, site
        self.arrived = False
        self.note()

    def note(self) -> None:
        """Note what is there already."""
        grad = self.home.parameter.grad if self.home.may_be_unused else None
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = -1 if grad is None else version_of(grad)

    @property
    def is_written(self) -> bool:
        """Whether there is a gradient that was not there before."""
        grad = self.home.parameter.grad
        if grad is None:
            return False
        return self._grad is None or self._grad() is not grad or self._version != version_of(grad)


def _mark(reduced: _Reduced, ended: AfterBackward, deliver: Callable[[], None], *_: Any) -> None:
    reduced.arrived = True
    ended.ask(deliver)


def _mark_unit(unit: int, passed: set[int], ended: AfterBackward, deliver: Callable[[], None], *_: Any) -> None:
    passed.add(unit)
    ended.ask(deliver)


class AfterBackward:
    """Calls a function once when the backward pass that is running has ended, and those of torch's wrappers have."""

    def __init__(self) -> None:
        self._waiting: weakref.ref[Any] | None = None

    def ask(self, function: Callable[[], None]) -> None:
        """From inside a gradient hook. The function is not held here: it may be a method of who holds this."""
        if self._waiting is None or self._waiting() is None:
            # Autograd alone holds it, until the pass ends or fails. When it is called, all of the pass has run, and
            # DDP and FSDP have asked to be called too: asked again, it comes after them.
            last = functools.partial(function)
            first = functools.partial(after_backward, last)
            self._waiting = weakref.ref(first)
            after_backward(first)
