"""What taps call: edits that are checked, looks at one call only, the end of a pass.

They are closures over what they need and nothing else: a hook that held on to the session would keep it, and with it
the hooks, alive for as long as the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhook import edits
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope, Stop
from torchhook._core.taps import Edit, Look, Tap
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook.errors import SelectorError


def only_edit(site: Site, edit: Edit, seen: set[Site]) -> Edit:
    """Edits the call that a site names, and notes in ``seen`` that it came; every call, if it names none."""
    if site.call is None:
        return edit

    def edit_one(value: Any, call: int) -> Any:
        if call != site.call:
            return value
        seen.add(site)
        return edit(value, call)

    return edit_one


def only_look(site: Site, look: Look, seen: set[Site]) -> Look:
    """As ``only_edit``, for who looks."""
    if site.call is None:
        return look

    def look_at_one(value: Any, call: int) -> None:
        if call == site.call:
            seen.add(site)
            look(value, call)

    return look_at_one


def of_leaf(site: Site, look: Look) -> Look:
    """Looks at the one part of a value that a site names."""
    if not site.leaf:
        return look

    def look_at_leaf(value: Any, call: int) -> None:
        try:
            part = tree.get(value, site.leaf)
        except KeyError as error:
            raise SelectorError(f"{site.shown!r}: {error.args[0]}.") from None
        look(part, call)

    return look_at_leaf


def checked(check: Callable[[Any], Any] | None, look: Look) -> Look:
    """Has a value checked before it is looked at."""
    return look if check is None else lambda value, call: look(check(value), call)


def looked_at_first(tap: Tap, look: Look) -> Edit:
    """An edit that changes nothing: it sees the value before the others do."""

    def pass_on(value: Any, call: int) -> Any:
        if not tap.recomputing:
            look(value, call)
        return value

    return pass_on


def editor(site: Site, edit: edits.Edit) -> Edit:
    """Tells an edit where it is, and checks what it makes."""

    def change(value: Any, call: int) -> Any:
        here = site.but(call=call)
        new = edit(value, here)
        if new is None or new is value:
            return value
        edits.check(value, new, here)
        return new

    return change


def stopper(scope: Scope, waiting: set[Site], site: Site, keeps: list[Keep], check: Callable[[], None]) -> Look:
    """Ends the pass once nothing is waited for any more."""

    def stop(value: Any, call: int) -> None:
        waiting.discard(site)
        if not waiting:
            if any(keep.mode in ("live", "reference") for keep in keeps):
                check()
            scope.stopped_at = str(site)
            raise Stop(scope)

    return stop
