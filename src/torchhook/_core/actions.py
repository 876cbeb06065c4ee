"""What taps call: edits that are checked, looks at one call only, the end of a pass.

They are closures over what they need and nothing else: a hook that held on to the session would keep it, and with it
the hooks, alive for as long as the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchhook import edits
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope, stop_pass
from torchhook._core.taps import Edit, Look, Tap
from torchhook._core.targets import Target
from torchhook._recording.address import Calls, Site
from torchhook._torch import loses_graph, out_of_checkpoints
from torchhook._values import tree
from torchhook._values.call_masks import CallPadding
from torchhook._values.heads import Where
from torchhook._values.padding import knowing
from torchhook._values.tree import Inputs
from torchhook.errors import SelectorError, SessionError


def only_edit(site: Site, edit: Edit, seen: set[Site]) -> Edit:
    """Edits the calls that a site names, and notes in ``seen`` that they came; every call, if it names none."""
    if site.call is None:
        return edit

    def edit_some(value: Any, call: int) -> Any:
        if not site.means(call):
            return value
        seen.add(site)
        return edit(value, call)

    return edit_some


def only_look(site: Site, look: Look, seen: set[Site]) -> Look:
    """As ``only_edit``, for who looks."""
    if site.call is None:
        return look

    def look_at_some(value: Any, call: int) -> None:
        if site.means(call):
            seen.add(site)
            look(value, call)

    return look_at_some


def only_keep(sites: Sequence[Site], look: Look, seen: set[Site]) -> Look:
    """As ``only_look``, for who keeps what several selectors name at one site, once; any call may be the last."""
    if not sites:
        return look

    def keep_some(value: Any, call: int) -> None:
        named = [site for site in sites if site.counts_back or site.means(call)]
        seen.update(named)
        if named:
            look(value, call)

    return keep_some


def of_leaf(site: Site, look: Look) -> Look:
    """Looks at the one part of a value that a site names."""
    if not site.leaf and not _is_named_input(site):
        return look

    def look_at_leaf(value: Any, call: int) -> None:
        try:
            part = tree.get(value, _part(site, value))
        except KeyError as error:
            raise SelectorError(f"{site.shown!r}: {error.args[0]}.") from None
        look(part, call)

    return look_at_leaf


def _is_named_input(site: Site) -> bool:
    return bool(site.role) and site.port in ("input", "grad_input")


def _part(site: Site, value: Any) -> str:
    """Which part of a value is meant: of a standard name the same tensor, whether it is given alone or with others."""
    if _is_named_input(site) and site.leaf in ("", "args.0"):
        return "args.0" if type(value) is Inputs and value.args else ""
    return site.leaf


def checked(check: Callable[[Any], Any] | None, look: Look) -> Look:
    """Has a value checked before it is looked at."""
    return look if check is None else lambda value, call: look(check(value), call)


def on_graph(site: Site, keep: Keep, look: Look) -> Look:
    """Refuses to keep a value as one on the graph where it is on none."""
    if keep.mode != "live":
        return look

    def look_at_live(value: Any, call: int) -> None:
        refuse_off_graph(site)
        look(value, call)

    return look_at_live


def refuse_off_graph(site: Site) -> None:
    """Say of a site whose value is wanted on the graph that a reentrant checkpoint keeps it off."""
    if loses_graph():
        raise SessionError(
            f"{site.shown!r} runs in a reentrant checkpoint, without gradients until the backward pass: what is kept "
            "of it now would have none. Checkpoint with use_reentrant=False, or keep detached values (th.capture)."
        )


def knowing_padding(padding: CallPadding | None, path: str, look: Look) -> Look:
    """Has transforms know what of a value is padding, as the call that runs says."""
    if padding is None:
        return look

    def look_knowing(value: Any, call: int) -> None:
        with knowing(padding.of(path)):
            look(value, call)

    return look_knowing


def inputs_kept_from(keep: Keep) -> Look:
    """Tells ``keep`` what the model is called with; written out for what most models are called with."""

    def look(value: Any, call: int) -> None:
        found: list[Tensor] = []
        parts = (*value.args, *value.kwargs.values()) if type(value) is Inputs else (value,)
        for part in parts:
            if type(part) is Tensor:
                found.append(part)
            elif type(part) not in _WITHOUT_TENSORS:
                found.extend(tree.tensors(part))
        keep.called_with(found)

    return look


_WITHOUT_TENSORS = (type(None), bool, int, float, str)


def looked_at_first(tap: Tap, look: Look) -> Edit:
    """An edit that changes nothing: it sees the value before the others do."""

    def pass_on(value: Any, call: int) -> Any:
        if not tap.recomputing:
            with out_of_checkpoints():
                look(value, call)
        return value

    return pass_on


ToCome = Callable[[], list[edits.StepsToCome]]
"""Asks an edit which steps it has waited for in vain."""


def placed(change: edits.Edit, target: Target, known: Where, own_threads: bool) -> tuple[edits.Edit, ToCome | None]:
    """An edit, ready for one target; and, where it is for some steps, whom to ask for those."""
    asks = edits.asks_step(change)
    if asks and not own_threads:
        raise SessionError(f"{change!r}: steps are counted in one thread only: leave out threads='all'.")
    change = edits.placed(change, target.site, known)
    return _of_part(change, target), functools.partial(_steps_of, change) if asks else None


def _steps_of(edit: edits.Edit) -> list[edits.StepsToCome]:
    return list(edits.steps_to_come(edit))


def _of_part(change: edits.Edit, target: Target) -> edits.Edit:
    """An edit of the one part of a value that a target means."""
    if not _is_named_input(target.site):
        return edits.at(target.site.leaf, change) if target.site.leaf else change

    def change_part(value: Any, site: Site) -> Any:
        leaf = _part(target.site, value)
        return edits.at(leaf, change)(value, site) if leaf else change(value, site)

    return change_part


def editor(site: Site, edit: edits.Edit) -> Edit:
    """Tells an edit where it is, and checks what it makes."""

    checks = not edits.changes_call(edit)

    def change(value: Any, call: int) -> Any:
        here = edits.EditSite(site.path, site.op, call, site.port, site.leaf, site.role)
        new = edit(value, here)
        if new is None or new is value:
            return value
        if checks:
            edits.check(value, new, here)
        return new

    return change


def stopper(scope: Scope, waiting: set[Site], site: Site, keeps: Sequence[Keep], check: Callable[[], None]) -> Look:
    """Ends the pass once nothing is waited for any more."""

    last = site.call.stop - 1 if isinstance(site.call, Calls) and site.call.stop is not None else None

    def stop(value: Any, call: int) -> None:
        if last is None or call >= last:
            waiting.discard(site)
        if not waiting:
            if any(keep.mode in ("live", "reference") for keep in keeps):
                check()
            scope.stopped_at = str(site)
            stop_pass(scope, value if site.is_output else None)

    return stop
