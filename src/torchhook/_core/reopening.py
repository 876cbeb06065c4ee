"""Opening a prepared session once more, where it only records: nothing is asked that was known the time before.

Each opening has a recording, a scope and taps of its own, as one that is built by its recipe: a call that has begun in
the one before may still find the old taps, and must not find the new recording by them.
"""

from __future__ import annotations

from torchhook._core import never_ran, steps
from torchhook._core.generators import generators
from torchhook._core.hooks import Attachment, is_script
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.wiring import Taps, opened
from torchhook._recording.records import Recording
from torchhook._torch.hooks import Undo, put_after, put_before
from torchhook.errors import NeverRanWarning, warn


class Reopening:
    """What a session that only records is made of, each time that it opens."""

    def __init__(self, taps: Taps, recording: Recording, keep: Keep, index: Index) -> None:
        self._keep, self._index = keep, index
        self._taps = taps  # as they were built: they are copied, and nothing passes them
        self._name, self._other_names = recording.model_name, recording.other_names
        self._find_layouts = recording.find_layouts
        self._generators = generators(index)
        self._not_called = {str(site): never_ran.NOT_CALLED for site in taps.targets}
        self._told = never_ran.told(self._not_called)

    @classmethod
    def of(cls, taps: Taps, recording: Recording, keeps: list[Keep], index: Index) -> Reopening | None:
        """How to open a session again that was just built, not opened; ``None`` where it does more than record."""
        if len(keeps) != 1 or keeps[0].asks_where or not taps.only_record():
            return None
        if is_script(index.root) or any(is_script(target.module) for target, _ in taps.targets.values()):
            return None  # they take no hooks
        return cls(taps, recording, keeps[0], index)

    def made(self, own_threads: bool) -> tuple[Recording, Scope, Taps]:
        """A recording, and what fills it."""
        recording, scope = Recording(self._name), Scope()
        recording.other_names, recording.find_layouts = self._other_names, self._find_layouts
        recording.wait_with(self._keep.wait)
        return recording, scope, self._taps.renewed(scope, scope if own_threads else None, recording)

    def attach(self, attachment: Attachment, recording: Recording, taps: Taps, own: Scope | None) -> None:
        """Attach the hooks, as ``Session`` does it for all kinds; ``own`` is the scope, if it sees its calls only."""
        undo, keep, index = attachment.undo, self._keep, self._index
        undo += (keep.release, taps.let_go)
        keep.owned_by(index.owned, index.plain_ids)
        opened[id(taps)] = taps
        if own is None:
            self._put(undo, taps)
            return
        undo.append(own.leave)
        if self._generators:
            attachment.attach_all(steps.between(self._generators, taps, recording, own, attachment))
        else:
            self._put(undo, taps)

    @staticmethod
    def _put(undo: Undo, taps: Taps) -> None:
        put_before(undo, taps.index.root, taps.root)
        for module, tap in taps.outputs():
            put_after(undo, module, tap)

    def note_idle(self, recording: Recording, taps: Taps, warns: bool) -> bool:
        """Note and say that nothing was called, if it was so; as ``Session`` finds it out for each site."""
        if taps.any_called:
            return False
        recording.missing.update(self._not_called)
        if warns:
            warn(self._told, NeverRanWarning)
        return True
