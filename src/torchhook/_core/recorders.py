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

    def __init__(
        self, targets: Sequence[Target], sites: Sequence[Site], modules: Sequence[nn.Module], limit: int | None
    ) -> None:
        self.targets, self.sites, self.modules, self.limit = targets, sites, modules, limit

    @classmethod
    def of(cls, targets: Sequence[Target], limit: int | None) -> Outputs | None:
        """``limit`` is how many values of each are kept; ``None`` where targets are more than this."""
        # Without generators: this is asked whenever a session is made, of hundreds of them.
        sites, modules, tensors = zip(*targets, strict=True)
        if any(tensors) or len(set(map(id, modules))) != len(modules) or [1 for site in sites if not site.is_output]:
            return None
        return cls(targets, sites, modules, limit)


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
        for tap in self.taps:  # noqa: SIM110 (a generator takes longer to begin than the first to be asked)
            if tap.ran or tap.elsewhere or tap.recomputed:
                return True
        return False
