"""A model over all batches of the data, for who takes the tokens of its values and writes no store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract import inputs, sources
from torchhook._extract.batches import Batch
from torchhook._extract.fill import Extras
from torchhook._extract.forward import Forward, parts
from torchhook._extract.image_folder import opened
from torchhook._extract.inputs import Part
from torchhook._extract.one_row import Square, try_one_row
from torchhook._extract.special_tokens import Drop, special_ids
from torchhook._extract.token_choice import TokenChoice
from torchhook._features.api import shown
from torchhook._values.running import Block
from torchhook.errors import ExtractError, hint

Take = Callable[[str, Block], None]
"""Takes the name of a column and its tokens, in the hook: what is not copied there may be overwritten afterwards."""


class Passes:
    """The model, the data and the sites of a call of ``stream`` or ``statistics``; ``epoch`` goes over all of it."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        sites: Selector,
        *,
        transform: Transforms = None,
        batch_size: int | None = None,
        lengths: Part = None,
        drop_special: Drop = False,
        input_fn: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        autocast: torch.dtype | bool | None = None,
        channel: int | None = None,
        maps: bool = False,
    ) -> None:
        self._forward = Forward(
            model,
            sites,
            transform=transform,
            input_fn=input_fn,
            autocast=autocast,
            cuts=lengths is not False,
            special=special_ids(model, drop_special),
        )
        self.model: nn.Module = model
        self.data: Any = opened(data, model)
        self.batch_size: int | None = batch_size
        self.lengths: Part = lengths
        self.workers: int | None = workers
        self.channel: int | None = channel
        self.maps: bool = maps
        self._checked = self._used_up = False

    @property
    def columns(self) -> list[str]:
        """The names of sites, in the order in which they were asked for."""
        return self._forward.sites

    def epoch(self, pin: bool) -> Generator[Batch, None, None]:
        """All batches of the data, from the beginning; to close it lets the workers of a loader go."""
        if self._used_up:
            raise ExtractError(
                f"the data is a {type(self.data).__name__}, which gives its batches once, and has given them. Pass "
                "what can be read again: a data set, a DataLoader, a list, or an object with __iter__."
            )
        self._used_up = hasattr(self.data, "__next__")
        source = sources.as_it_comes(self.data, self.batch_size, self.workers, pin)
        # The same for all batches: it knows whether a table of lengths has an entry for each row.
        self.extras: Extras = Extras(None, False, self.lengths, source.rows)
        spans = [] if source.rows is None else [(0, source.rows)]
        return self._told(source.batches(spans))

    def _told(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ExtractError("the data has no rows.")

    def run(self, batch: Batch, device: torch.device, take: Take) -> None:
        """One batch through the model, which is in evaluation mode and on ``device``; ``take`` gets every column."""
        try:
            if self._checked:
                self._run(batch, device, take, stop=True)
            else:
                self._first(batch, device, take)
        except Exception as error:
            hint(error, f"raised by rows {batch.start} to {batch.start + batch.span - 1} of the data.")
            raise

    def _first(self, batch: Batch, device: torch.device, take: Take) -> None:
        # Whole: a layer may run again after the last site was seen, and then its address is not enough.
        square = Square(batch.value, batch.span)
        with inputs.explaining(batch.value, self.model, self._forward.input_fn):
            self._run(batch, device, take, stop=False, see=square.see)
        if square.found:
            try_one_row(self._forward, batch, self.extras, device)
        self._checked = True

    def _run(
        self,
        batch: Batch,
        device: torch.device,
        take: Take,
        stop: bool,
        see: Callable[[str, Any], None] | None = None,
    ) -> None:
        call = self._forward.call_of(batch.value)
        said = self.extras.padding(batch.value, batch.start, batch.good)
        choice = TokenChoice(batch.span, batch.start, self.channel, self.maps, self._forward.checked)
        calls: Counter[str] = Counter()
        heads = self._forward.heads

        def put(site: str, value: Any) -> None:
            calls[site] += 1
            if calls[site] > 1:
                raise ExtractError(
                    f"{shown(site)!r} runs more than once in one forward pass: say which call is meant, "
                    f"'{shown(site)}#0' or another."
                )
            columns = list(parts(site, value))
            if not columns:
                raise ExtractError(f"{shown(site)!r} gives {type(value).__name__}, which has no tensor in it.")
            for name, part in columns:
                take(name, choice(name, part, heads[site]))

        self._forward.run(call, batch.value, device, put, stop, said, see)

    def ordered(self, columns: Any) -> list[str]:
        """Names of columns in the order of the sites, and not in that in which they ran."""
        found = ([c for c in columns if c == site or c.startswith(f"{site}[")] for site in self._forward.sites)
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))
