"""From what a user gives as an edit to a function of value and site."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchhook._recording.address import Site
from torchhook._values.value_object import shown
from torchhook.edits.protocol import CataloguedEdit, Edit
from torchhook.errors import EditError


def adapt(edit: Any) -> Edit:
    """An edit that takes value and site, whatever the function it is made of takes; a sequence runs in order."""
    if isinstance(edit, (list, tuple)):
        return _Steps(tuple(adapt(step) for step in edit))
    # Every function of the catalogue makes edits, and being callable would pass as one of the user's.
    if inspect.isfunction(edit) and edit.__module__ == "torchhook.edits.catalogue":
        raise EditError(f"edits.{edit.__name__} makes an edit when it is called: write edits.{edit.__name__}(…).")
    if not callable(edit):
        raise EditError(
            f"{edit!r} is not an edit. Use one of torchhook.edits (edits.replace(value) puts a value in), "
            "or a function f(value) or f(value, site)."
        )
    return edit if isinstance(edit, CataloguedEdit) or _wants_site(edit) else _OfValue(edit)


@dataclass(frozen=True, eq=False, repr=False)
class _Steps(CataloguedEdit):
    """Several edits, one after the other."""

    steps: tuple[Edit, ...]

    def __call__(self, value: Any, site: Site) -> Any:
        for step in self.steps:
            new = step(value, site)
            value = value if new is None else new
        return value

    def __repr__(self) -> str:
        return shown(list(self.steps))


@dataclass(frozen=True, eq=False, repr=False)
class _OfValue(CataloguedEdit):
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
