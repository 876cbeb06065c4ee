"""The taps of a session that only records what leaves modules, as most do: made, asked and put on all together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.select import Target
from torchhook._core.taps import RecordTap
from torchhook._recording.records import Recording


def are_outputs(targets: Sequence[Target]) -> bool:
    """Whether targets are what different modules return, and nothing else."""
    # Lists, and no generators: this is asked whenever a session is made, of hundreds of them.
    if [1 for site, _, tensor in targets if tensor is not None or not site.is_output]:
        return False
    return len({id(module) for _, module, _ in targets}) == len(targets)


class Recorders:
    """One for each target, in their order; ``limit`` is how many values of each are kept."""

    # In lists beside each other: what holds them together by pairs is for the garbage collector to go through.

    def __init__(
        self,
        targets: Sequence[Target],
        keep: Keep,
        recording: Recording,
        limit: int | None,
        seen_from: Scope | None,
        task: int,
    ) -> None:
        self.targets, self.limit, order = targets, limit, recording.order
        rows = recording.opened_all([site for site, _, _ in targets], limit)
        self.taps = [
            RecordTap(target[0].path, seen_from, keep, of, order, task)
            for target, of in zip(targets, rows, strict=True)
        ]

    def pairs(self) -> Iterable[tuple[nn.Module, RecordTap]]:
        """Modules, and the taps behind them."""
        return zip([target[1] for target in self.targets], self.taps, strict=True)

    def all_ran(self) -> bool:
        """Whether each was called, in this session's sight and nowhere else."""
        return not [tap for tap in self.taps if not tap.ran or tap.elsewhere or tap.recomputed]

    def any_called(self) -> bool:
        """Whether one of them was called, in this session's sight or elsewhere."""
        return bool([tap for tap in self.taps if tap.ran or tap.elsewhere or tap.recomputed])
