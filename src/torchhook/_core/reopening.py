"""Opening a session that only records, by what it is made of; and once more, where nothing is asked that is known.

Each opening has a recording, a scope and taps of its own, as one that is built by its recipe: a call that has begun in
the one before may still find the old taps, and must not find the new recording by them.
"""

from __future__ import annotations

from torchhook._core import never_ran, steps
from torchhook._core.generators import generators
from torchhook._core.hooks import Attachment
from torchhook._core.index import Index, is_script
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.wiring import Taps, opened
from torchhook._recording.records import Recording
from torchhook._torch.hooks import put_all_after, put_before
from torchhook.errors import NeverRanWarning, warn


class Reopening:
    """What a session that only records is made of, each time that it opens."""

    def __init__(self, taps: Taps, recording: Recording, keep: Keep, index: Index) -> None:
        made = taps.recorders
        assert made is not None
        # Not the taps themselves: they know what they have recorded.
        self._outputs = made.outputs
        self._looks, self._made_in = taps.root.looks, taps.root.made_in
        self._keep, self._index = keep, index
        self._name, self._other_names = recording.model_name, recording.other_names
        self._find_layouts = recording.find_layouts
        self._generators = generators(index)
        self._not_called: dict[str, str] = {}
        self._told = ""

    @classmethod
    def of(cls, taps: Taps, recording: Recording, keeps: list[Keep], index: Index) -> Reopening | None:
        """How to open a session that was just built; ``None`` where it does more than record."""
        if len(keeps) != 1 or keeps[0].asks_where or not taps.only_record():
            return None
        made = cls(taps, recording, keeps[0], index)
        kinds = dict(zip(map(type, made._outputs.modules), made._outputs.modules, strict=True))  # few, of hundreds
        if is_script(index.root) or any(map(is_script, kinds.values())):
            return None  # they take no hooks
        return made

    def made(self, own_threads: bool) -> tuple[Recording, Scope, Taps]:
        """A recording, and what fills it."""
        recording, scope = Recording(self._name), Scope()
        recording.other_names, recording.find_layouts = self._other_names, self._find_layouts
        recording.wait_with(self._keep.wait)
        taps = Taps(self._index, scope, scope if own_threads else None)
        taps.root.looks = self._looks
        taps.record_outputs(self._outputs, self._keep, recording, self._made_in)
        return recording, scope, taps

    def attach(self, attachment: Attachment, recording: Recording, taps: Taps, own: Scope | None) -> None:
        """Attach the hooks, as ``Session`` does it for all kinds; ``own`` is the scope, if it sees its calls only."""
        undo, keep, index, made = attachment.undo, self._keep, self._index, taps.recorders
        assert made is not None
        undo += (keep.release, taps.let_go)
        keep.owned_by(index.owned, index.plain_ids)
        opened[id(taps)] = taps
        if own is not None:
            undo.append(own.leave)
        if own is None or not self._generators:
            put_before(undo, index.root, taps.root)
            put_all_after(undo, made.pairs())
            return
        begin, end = steps.counted(self._generators, recording, own, attachment)
        attachment.attach_all(begin)
        put_before(undo, index.root, taps.root)
        put_all_after(undo, made.pairs())
        attachment.attach_all(end)

    def note_idle(self, recording: Recording, taps: Taps, warns: bool) -> bool:
        """Note and say that nothing was called, if it was so; as ``Session`` finds it out for each site."""
        made = taps.recorders
        if made is None or taps.root.ran or taps.root.elsewhere or made.any_called():
            return False
        if not self._told:
            self._not_called = {str(site): never_ran.NOT_CALLED for site in self._outputs.sites}
            self._told = never_ran.told(self._not_called)
        recording.missing.update(self._not_called)
        if warns:
            warn(self._told, NeverRanWarning)
        return True
