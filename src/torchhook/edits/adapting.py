"""From what a user gives as an edit to a function of value and site."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._values.heads import KnownHeads
from torchhook._values.parts import Part
from torchhook._values.value_object import shown
from torchhook.edits.changing import check
from torchhook.edits.protocol import CataloguedEdit, Edit, StepsToCome, asks_step, placed, steps_to_come
from torchhook.errors import EditError


def adapt(edit: Any) -> Edit:
    """An edit that takes value and site, whatever the function it is made of takes; a sequence runs in order."""
    if isinstance(edit, CataloguedEdit):
        return edit
    if isinstance(edit, (list, tuple)):
        return Steps(tuple(adapt(step) for step in edit))
    # Every function of the catalogue makes edits, and being callable would pass as one of the user's.
    if inspect.isfunction(edit) and str(edit.__module__).startswith("torchhook.edits."):
        raise EditError(f"edits.{edit.__name__} makes an edit when it is called: write edits.{edit.__name__}(…).")
    if not callable(edit):
        raise EditError(
            f"{edit!r} is not an edit. Use one of torchhook.edits (edits.replace(value) puts a value in), "
            "or a function f(value) or f(value, site)."
        )
    return edit if _wants_site(edit) else OfValue(edit)


def no_dict(edits: Any, keys: str) -> TypeError:
    """What is said to who gives an edit, or anything else, and not where it belongs."""
    if not isinstance(edits, CataloguedEdit):
        return TypeError(f"edits are a dict of {keys} and edits, found {type(edits).__name__}.")
    return TypeError(f"edits are a dict of {keys} and edits, found {edits!r}: say where, {{'h.3': {edits!r}}}.")


@dataclass(frozen=True, eq=False, repr=False)
class Steps(CataloguedEdit):
    """Several edits, one after the other."""

    steps: tuple[Edit, ...]

    def __call__(self, value: Any, site: Site) -> Any:
        for step in self.steps:
            new = step(value, site)
            if self.changes_call and new is not None and not changes_call(step):
                check(value, new, site)  # nobody else does
            value = value if new is None else new
        return value

    @property
    def changes_call(self) -> bool:  # type: ignore[override]
        return any(map(changes_call, self.steps))

    @property
    def asks_step(self) -> bool:  # type: ignore[override]
        return any(map(asks_step, self.steps))

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        return Steps(tuple(placed(step, site, known) for step in self.steps))

    def steps_to_come(self) -> Iterator[StepsToCome]:
        return chain.from_iterable(map(steps_to_come, self.steps))

    def within(self, part: Part, whole: Tensor) -> Edit:
        return Steps(tuple(within(step, part, whole) for step in self.steps))

    def __repr__(self) -> str:
        return shown(list(self.steps))


def changes_call(edit: Edit) -> bool:
    """As ``CataloguedEdit.changes_call``, for any edit."""
    return isinstance(edit, CataloguedEdit) and edit.changes_call


def within(edit: Edit, part: Part, whole: Tensor) -> Edit:
    """As ``CataloguedEdit.within``, for any edit."""
    return edit.within(part, whole) if isinstance(edit, CataloguedEdit) else edit


@dataclass(frozen=True, eq=False, repr=False)
class OfValue(CataloguedEdit):
    """A function that takes the value alone."""

    function: Callable[[Any], Any]

    def __call__(self, value: Any, site: Site) -> Any:
        return self.function(value)

    def __repr__(self) -> str:
        return shown(self.function)


def _wants_site(edit: Callable[..., Any]) -> bool:
    """Whether a function takes the site: as its second argument, unless that has a default of its own."""
    try:
        # A module's own __call__ takes anything.
        signature = inspect.signature(edit.forward if isinstance(edit, torch.nn.Module) else edit)
    except ValueError:  # a builtin without a signature
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind in places]
    return len(parameters) > 1 and (parameters[1].default is inspect.Parameter.empty or parameters[1].name == "site")
