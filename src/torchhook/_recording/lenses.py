"""What a lens shows: the tokens that a model would say at each place of its stream. It prints itself and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import MissingRecordError, suggestion

_WIDE = 8  # columns, each a token and a number: with the names of the sites, about what a wide terminal shows


class Lens(Mapping[str, Tensor]):
    """Logits by site, made when they are asked for, and the tokens that are on top at each.

    ``tokens`` and ``probabilities`` are sites × batch × positions × top. ``others`` are addresses that sites have, too.
    """

    def __init__(
        self,
        sites: Sequence[str],
        logits: Callable[[str], Tensor],
        top: int,
        name: Callable[[int], str] = str,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.sites: list[str] = list(sites)
        self._logits = logits
        self._others = dict(others or {})
        self.name: Callable[[int], str] = name
        best = [_best(logits(site), top) for site in self.sites]
        shapes = {site: tuple(tokens.shape[:2]) for site, (tokens, _) in zip(self.sites, best, strict=True)}
        if len(set(shapes.values())) > 1:
            found = ", ".join(f"{site} {shape}" for site, shape in shapes.items())
            raise ValueError(f"a lens needs the same rows and positions at every site, found {found}: capture alike.")
        self.tokens: Tensor = torch.stack([tokens for tokens, _ in best])
        self.probabilities: Tensor = torch.stack([probabilities for _, probabilities in best])

    def __getitem__(self, site: str) -> Tensor:
        site = site if site in self.sites else self._others.get(site, site)
        if site not in self.sites:
            raise MissingRecordError(f"no site {site!r} in this lens. {suggestion(site, self.sites)}")
        return self._logits(site)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def table(self, sample: int = 0, positions: Sequence[int] | None = None) -> Table:
        """The token on top at each site and position of one row of the batch, with its probability."""
        count = self.tokens.shape[2]
        shown = list(range(count)) if positions is None else [range(count)[p] for p in positions]
        notes = []
        if positions is None and count > _WIDE:
            shown = shown[-_WIDE:]
            notes = [f"the last {_WIDE} of {count} positions; table(positions=…) shows others"]
        rows = [[site, *(self._cell(i, sample, p) for p in shown)] for i, site in enumerate(self.sites)]
        sites = counted(len(self.sites), "site")
        title = f"Lens of {sites}: the token on top and its probability, row {sample} of the batch"
        return Table(title, ["site", *(str(p) for p in shown)], rows, notes)

    def _cell(self, site: int, row: int, position: int) -> str:
        token = int(self.tokens[site, row, position, 0])
        name = str(token) if self.name is str else repr(self.name(token))
        return f"{name} {float(self.probabilities[site, row, position, 0]):.2f}"

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _best(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    if logits.dim() == 2:  # one position only
        logits = logits.unsqueeze(1)
    found = logits.float().softmax(-1).topk(min(top, logits.shape[-1]), dim=-1)
    return found.indices.cpu(), found.values.cpu()
