"""What is noted in a recording when its session closes: which sites never ran and why, what ran out of its sight."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchhook._core import never_ran
from torchhook._core.index import Index
from torchhook._core.scope import Scope
from torchhook._core.wiring import Taps
from torchhook._recording.address import Site
from torchhook._recording.records import Recording


def note(
    recording: Recording,
    taps: Taps,
    index: Index,
    scope: Scope,
    error: BaseException | None,
    is_as_it_was: bool,
    followed: Mapping[Site, Tensor],
    seen: set[Site],
) -> None:
    """Note it, site by site.

    Args:
        recording: Where it is noted.
        taps: What has seen the values.
        index: The names of the model.
        scope: The session that closes.
        error: What ended its block, if anything did.
        is_as_it_was: Whether all modules are known to be where they were.
        followed: The parameters whose gradients were wanted, as they were when the session opened.
        seen: The sites that name calls and came.
    """
    ran = taps.any_ran
    for site, (target, tap) in taps.targets.items():
        forward = taps.passing(site, tap)
        if is_as_it_was and tap.ran and site.call is None and not (tap.elsewhere or forward.recomputed):
            continue  # nothing to say, as of most
        address = str(site)
        replaced = "" if is_as_it_was else never_ran.replaced(target, index, followed)
        if tap.elsewhere:
            recording.elsewhere[address] = tap.elsewhere
        if forward.recomputed:
            recording.recomputed[address] = forward.recomputed
        if replaced:
            # Its hooks are on what was there when the session opened; the new one has none.
            recording.replaced[address] = f"{replaced}: its calls and gradients were not seen"
        if never_ran.came(site, tap, recording, seen):
            continue
        why = never_ran.ended_by(error, replaced)
        if not (why or ran or tap.elsewhere) and forward is tap and never_ran.takes_hooks(target, index):
            why = never_ran.NOT_CALLED
        elif not why:
            why = never_ran.cause(target, tap, forward, index, taps.by_module, scope, taps.listener)
        recording.missing[address] = why
