"""Opening a session that only records, by what it is made of; and once more, where nothing is asked that is known.

Each opening has a recording, a scope and taps of its own, as one that is built by its recipe: a call that has begun in
the one before may still find the old taps, and must not find the new recording by them.
"""

from __future__ import annotations

from torchhook._core import never_ran, steps
from torchhook._core.actions import inputs_kept_from
from torchhook._core.generators import generators
from torchhook._core.hooks import Attachment
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.recorders import Recorders
from torchhook._core.scope import Scope
from torchhook._core.select import found_later
from torchhook._core.targets import Outputs
from torchhook._core.wiring import Taps, opened
from torchhook._recording.records import Recording
from torchhook._torch.hooks import put_around
from torchhook.errors import NeverRanWarning, warn


class Reopening:
    """What a session that only records is made of, each time that it opens."""

    def __init__(self, index: Index, outputs: Outputs, keep: Keep, limit: int | None) -> None:
        """``limit`` is how many values of each are kept."""
        self.outputs = outputs
        self._index, self._keep, self._limit = index, keep, limit
        self._looks = (inputs_kept_from(keep),)
        self._found_later = found_later(index, outputs.sites)
        self._generators = generators(index)
        self._not_called: dict[str, str] = {}
        self._told = ""

    def begin(self, recording: Recording, taps: Taps) -> list[Keep]:
        """Have new taps fill a new recording; what keeps its values is returned."""
        recording.other_names, recording.find_layouts = self._found_later
        recording.wait_with(self._keep.wait)
        scope, task = taps.seen_from, taps.root.made_in
        taps.record_all(Recorders(self.outputs, self._limit, self._keep, recording, scope, task), self._looks)
        return [self._keep]

    def attach(self, attachment: Attachment, recording: Recording, taps: Taps, own: Scope | None) -> None:
        """Attach the hooks, as ``Session`` does it for all kinds; ``own`` is the scope, if it sees its calls only."""
        keep, index, made = self._keep, self._index, taps.recorders
        assert made is not None

        def end() -> None:
            taps.let_go()
            keep.release()
            if own is not None:
                own.leave()

        attachment.undo.append(end)
        keep.owned_by(index.owned, index.plain_ids)
        opened[id(taps)] = taps
        if own is None or not self._generators:
            put_around(attachment.undo, index.root, taps.root, made.pairs())
            return
        begin, last = steps.counted(self._generators, recording, own, attachment)
        attachment.attach_all(begin)
        put_around(attachment.undo, index.root, taps.root, made.pairs())
        attachment.attach_all(last)

    def note_idle(self, recording: Recording, taps: Taps, warns: bool) -> bool:
        """Note and say that nothing was called, if it was so; as ``Session`` finds it out for each site."""
        made = taps.recorders
        if made is None or made.any_called() or taps.root.ran or taps.root.elsewhere:
            return False
        if not self._told:
            self._not_called = {str(site): never_ran.NOT_CALLED for site in self.outputs.sites}
            self._told = never_ran.told(self._not_called)
        recording.missing.update(self._not_called)
        if warns:
            warn(self._told, NeverRanWarning)
        return True
