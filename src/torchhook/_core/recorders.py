"""A session that only records what leaves modules, as most do: made, put on and asked all together, each time it opens.

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
from torchhook._core.scope import Scope
from torchhook._core.select import found_later
from torchhook._core.targets import Outputs
from torchhook._core.wiring import Taps, opened
from torchhook._recording.records import Recording
from torchhook._torch.hooks import put_around
from torchhook.errors import NeverRanWarning, warn


class Recorders:
    """What all openings of such a session share."""

    def __init__(self, index: Index, outputs: Outputs, keep: Keep, limit: int | None) -> None:
        """``limit`` is how many values of each are kept."""
        self.outputs = outputs
        self._index, self._keep, self._limit = index, keep, limit
        self._looks = (inputs_kept_from(keep),)
        self._found_later = found_later(index, outputs.sites)
        self._generators = generators(index)

    def begin(self, recording: Recording, taps: Taps) -> tuple[Keep]:
        """Have new taps fill a new recording; what keeps its values is returned."""
        recording.other_names, recording.find_layouts = self._found_later
        recording.wait_with(self._keep.wait)
        taps.record_all(self.outputs, self._keep, recording, self._limit, self._looks)
        return (self._keep,)

    def attach(self, attachment: Attachment, recording: Recording, taps: Taps, own: Scope | None) -> None:
        """Attach the hooks, as ``Session`` does it for all kinds; ``own`` is the scope, if it sees its calls only."""
        keep, index, recorders = self._keep, self._index, taps.recorders
        assert recorders is not None

        def end() -> None:
            taps.let_go()
            keep.release()
            if own is not None:
                own.leave()

        attachment.undo.append(end)
        keep.owned_by(index.owned, index.plain_ids)
        opened[id(taps)] = taps
        if own is None or not self._generators:
            put_around(attachment.undo, index.root, taps.root, self.outputs.modules, recorders)
            return
        begin, last = steps.counted(self._generators, recording, own, attachment)
        attachment.attach_all(begin)
        put_around(attachment.undo, index.root, taps.root, self.outputs.modules, recorders)
        attachment.attach_all(last)

    def has_told(self, recording: Recording, taps: Taps, warns: bool) -> bool:
        """Whether all has been noted and said that there is to say: where every module was called, or none was."""
        recorders = taps.recorders
        if recorders is None:
            return False
        idle = 0
        for tap in recorders:
            if tap.elsewhere or tap.recomputed:
                return False
            idle += not tap.ran
        if not idle:
            return True
        if idle < len(recorders) or taps.root.ran or taps.root.elsewhere:
            return False
        missing, told = never_ran.not_called(self.outputs.sites)
        recording.missing.update(missing)
        if warns:
            warn(told, NeverRanWarning, known=3)  # this, and two of the session that closes
        return True
