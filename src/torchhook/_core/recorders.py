"""The taps of a session that only records what leaves modules, as most do: made, asked and put on all together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.select import Target
from torchhook._core.taps import RecordTap
from torchhook._recording.address import Site
from torchhook._recording.records import Recording


class Outputs:
    """What different modules return, and nothing else: what all openings of a session record."""

    __slots__ = ("limit", "modules", "sites", "targets")

    def __init__(self, targets: Sequence[Target], limit: int | None) -> None:
        self.targets, self.limit = targets, limit
        self.sites: list[Site] = [target[0] for target in targets]
        self.modules: list[nn.Module] = [target[1] for target in targets]

    @classmethod
    def of(cls, targets: Sequence[Target], limit: int | None) -> Outputs | None:
        """``limit`` is how many values of each are kept; ``None`` where targets are more than this."""
        # Lists, and no generators: this is asked whenever a session is made, of hundreds of them.
        if [1 for site, _, tensor in targets if tensor is not None or not site.is_output]:
            return None
        found = cls(targets, limit)
        return found if len(set(map(id, found.modules))) == len(targets) else None


class Recorders:
    """One tap for each of some outputs, in their order."""

    # In lists beside each other: what holds them together by pairs is for the garbage collector to go through.

    def __init__(self, outputs: Outputs, keep: Keep, recording: Recording, seen_from: Scope | None, task: int) -> None:
        self.outputs, order = outputs, recording.order
        rows = recording.opened_all(outputs.sites, outputs.limit)
        self.taps = [
            RecordTap(site.path, seen_from, keep, of, order, task) for site, of in zip(outputs.sites, rows, strict=True)
        ]

    def pairs(self) -> Iterable[tuple[nn.Module, RecordTap]]:
        """Modules, and the taps behind them."""
        return zip(self.outputs.modules, self.taps, strict=True)

    def all_ran(self) -> bool:
        """Whether each was called, in this session's sight and nowhere else."""
        return not [tap for tap in self.taps if not tap.ran or tap.elsewhere or tap.recomputed]

    def any_called(self) -> bool:
        """Whether one of them was called, in this session's sight or elsewhere."""
        return bool([tap for tap in self.taps if tap.ran or tap.elsewhere or tap.recomputed])
