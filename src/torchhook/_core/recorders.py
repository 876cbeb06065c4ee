"""The taps of a session that only records what leaves modules, as most do: made, asked and put on all together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.taps import RecordTap
from torchhook._core.targets import Outputs
from torchhook._recording.records import Recording


class Recorders:
    """One tap for each of some outputs, in their order."""

    __slots__ = ("outputs", "taps")

    def __init__(
        self,
        outputs: Outputs,
        limit: int | None,
        keep: Keep,
        recording: Recording,
        seen_from: Scope | None,
        task: int,
    ) -> None:
        self.outputs, order = outputs, recording.order
        rows = recording.opened_all(outputs.sites, limit)
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
