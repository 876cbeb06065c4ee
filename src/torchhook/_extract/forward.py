"""One batch through the model: a session whose hooks hand each value on, and which stops at the last one needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook import transforms
from torchhook._core.heads import heads_at
from torchhook._core.index import Index
from torchhook._core.per_site import Transforms, by_target
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._extract import inputs
from torchhook._extract.padding import PaddingOf, Said, Trial
from torchhook._extract.special_tokens import Left, TokenIds, guarded
from torchhook._extract.token_choice import TokenChoice, tokens_first
from torchhook._features.api import ColumnSpec, shown
from torchhook._values import tree
from torchhook._values.heads import Where, has_heads
from torchhook._values.padding import Known, afterwards, knowing
from torchhook._values.tree import Inputs
from torchhook.errors import ExtractError, SelectorError, TransformError
from torchhook.transforms import Rows, Transform

Put = Callable[[str, Any], None]
"""Takes the address of a site and what is kept of its value."""


class Forward:
    """The model and the sites that are wanted of it."""

    def __init__(
        self,
        model: nn.Module,
        sites: Selector,
        *,
        transform: Transforms = None,
        input_fn: Callable[[Any], Any] | None = None,
        autocast: torch.dtype | bool | None = None,
        cuts: bool = False,
        special: frozenset[int] | None = None,
        by_row: bool = False,
    ) -> None:
        self.model, self.input_fn, self.autocast = model, input_fn, autocast
        self.cuts = cuts
        """Whether who takes the values leaves padding out himself: what is known of it is then known there, too."""
        self.special = special
        """Tokens to leave out: transforms see those that are left, and so does who takes the values."""
        self.by_row = by_row
        """Whether values come as rows of the tokens that are left."""
        self.index = Index(model)
        self.targets = resolve(self.index, sites)
        self.sites = [str(target.site) for target in self.targets]
        for target in self.targets:
            if target.tensor is not None or target.site.port.startswith("grad"):
                kind = "a parameter" if target.tensor is not None else "a gradient"
                raise ExtractError(f"{target.site.shown!r} is {kind}: only what the forward pass makes has rows.")
        self.transforms = _by_site(transform, self.index, self.targets)
        self.padding = PaddingOf(model, self.targets)
        self._look_around()
        self.transform: Transform | dict[str, Transform] | None
        """What was asked for, by the names of sites where it is not the same for all: what a store remembers."""
        if isinstance(transform, Mapping):
            self.transform = {site: one for site, one in self.transforms.items() if one is not None}
        else:
            self.transform = transform

    def _look_around(self) -> None:
        """Ask once for all batches, where anybody does."""
        around = {str(target.site): heads_at(self.index, target) for target in self.targets}
        self.checked: set[str] = set()
        """Sites whose repeated heads were seen to be alike."""
        checks = guarded if self.special is not None else lambda transform: transform
        self.placed = {site: transforms.placed(checks(self.transforms[site]), where) for site, where in around.items()}
        self.heads: dict[str, Where] = {
            site: transforms.heads_after(self.transforms[site], where) for site, where in around.items()
        }
        """What is known of the heads in what comes out of the transforms, by site."""

    def __getstate__(self) -> dict[str, Any]:
        # An index knows modules by id, which says nothing in another process.
        return {**self.__dict__, "index": None, "targets": [t.site for t in self.targets], "placed": {}, "heads": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.index = Index(self.model)
        self.targets = resolve(self.index, state["targets"])
        self._look_around()

    def __call__(
        self, batch: Any, device: torch.device, put: Put, stop: bool = True, said: Said = None, see: Put | None = None
    ) -> None:
        """Run a batch; ``put`` is called inside the hooks, when the value is still what the layer produced.

        ``said`` is what the user says about its padding; left out, the model's own mask is looked for. ``see`` is
        called with values as they pass, before any transform.
        """
        self.run(self.call_of(batch), batch, device, put, stop, said, see)

    @property
    def takes_tokens(self) -> bool:
        """Whether who takes the values finds the tokens himself, also where heads come first."""
        return self.cuts and not self.by_row

    def call_of(self, batch: Any) -> Inputs:
        """What the model is called with."""
        return inputs.call_of(batch, self.model, self.input_fn)

    def run(
        self,
        given: Inputs,
        batch: Any,
        device: torch.device,
        put: Put,
        stop: bool = True,
        said: Said = None,
        see: Put | None = None,
    ) -> None:
        """As calling this with the batch, which ``call_of`` has read already."""
        # On the host, before anything moves: a question about tensors on a GPU would wait for it.
        known = self.padding(given, batch, said, wanted=self.cuts or any(self.transforms.values()))
        call = inputs.move(given, device)
        whole = self.cuts or bool(said)
        put = self._with_tokens_first(put) if said and not self.takes_tokens else put
        # One padded batch tells as much as all of them.
        trial = None
        if known and not self.padding.tried:
            own = self.padding(given, batch, None, wanted=False) if said else known
            trial = Trial(call, known, own, self.heads, whole, self._in_halves())
        inner = put if trial is None else trial.keep(put)
        self._run(call, device, *self._without_special(given, inner, known), stop, see)
        self.padding.say_unknown(known)
        if trial is not None:
            self.padding.tried = trial.run(
                lambda one, look: self._run(one, device, *self._without_special(one, look, trial.alone), stop=True)
            )

    def _run(
        self,
        call: Inputs,
        device: torch.device,
        put: Put,
        known: Mapping[str, Known],
        stop: bool,
        see: Put | None = None,
    ) -> None:
        # For each batch, because a session opens once; the index serves all of them.
        session = Session(self.model, index=self.index, warn=False)
        for target in self.targets:
            site = str(target.site)
            if see is not None:
                session.look(target, _shown_to(see, site))
            session.look(target, _hand_on(site, self.placed[site], known.get(site), put))
        if stop:
            session.stop_when_seen(self.targets)
        # Not inference_mode: what a model keeps for itself, a cache of positions, could not be trained with later.
        with torch.no_grad(), self._autocast(device), session:
            self.model(*call.args, **call.kwargs)
        for site, why in session.recording.missing.items():
            raise ExtractError(f"{shown(site)!r} did not run: {why}")

    def _with_tokens_first(self, put: Put) -> Put:
        """``put``, given values of which rows can be cut: dim 1 are the tokens, also where heads come first."""

        def moved(site: str, value: Any) -> Any:
            if isinstance(value, Rows):  # cut already, as rows of tokens
                return value
            if isinstance(value, Columns):
                return Columns({name: moved(site, part) for name, part in value.items()})
            known = self.heads[site]
            return tree.map_tensors(lambda tensor: tokens_first(site, tensor, known, self.checked), value)

        return lambda site, value: put(site, moved(site, value))

    def _without_special(self, call: Inputs, put: Put, known: Mapping[str, Known]) -> tuple[Put, Mapping[str, Known]]:
        """``put``, and what is known at each site, where special tokens are left out as padding is."""
        if self.special is None:
            return put, known
        ids = TokenIds(call, self.padding.parameters)  # on the host, too
        paths = self.padding.paths.items()
        left = {site: Left(site, known.get(site), ids.of_site(path), self.special) for site, path in paths}
        return self._rows_of_tokens(ids, put) if self.by_row else put, left

    def _rows_of_tokens(self, ids: TokenIds, put: Put) -> Put:
        """``put``, given the tokens of each row that are left."""
        if ids.rows is None:
            raise ExtractError(
                "drop_special= needs the token ids, and the model is called with none. Leave such tokens out with "
                "lengths= (a mask) instead."
            )
        choice = TokenChoice(ids.rows, 0, None, False, self.checked)

        def cut(site: str, value: Any) -> None:
            found = {name: choice.by_row(name, part, self.heads[site]) for name, part in parts(site, value)}
            put(site, found[site] if list(found) == [site] else Columns(found))

        return cut

    def heads_first(self, columns: Iterable[ColumnSpec]) -> list[str]:
        """The columns whose rows are ``(heads, T, D)``: who reads them could take them for maps."""
        found = []
        for spec in columns:
            where = self.heads.get(spec.name) or self.heads.get(spec.name.rpartition("[")[0])
            if where is not None and not spec.ragged and len(spec.shape) == 3 and has_heads((1, *spec.shape), where()):
                found.append(spec.name)
        return found

    def _in_halves(self) -> bool:
        """Whether numbers are rounded so much that those of two batches may differ."""
        return bool(self.autocast) or any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters())

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(device.type, None if self.autocast is True else self.autocast)


def _shown_to(see: Put, site: str) -> Look:
    return lambda value, call: see(site, value)


def _hand_on(site: str, transform: Transform | None, known: Known | None, put: Put) -> Look:
    if transform is None:
        return lambda value, call: _put(put, site, value, known)

    def transformed(value: Any, call: int) -> None:
        try:
            with knowing(known):
                kept = transform(value)
        except TransformError as error:
            raise TransformError(f"{shown(site)!r}: {error}") from error
        _put(put, site, kept, afterwards(transform, known))

    return transformed


def _put(put: Put, site: str, value: Any, known: Known | None) -> None:
    with knowing(known):
        put(site, value)


def _by_site(transform: Transforms, index: Index, targets: Sequence[Target]) -> dict[str, Transform | None]:
    """The transform of each site."""
    try:
        found = by_target(transform, index, targets)
    except SelectorError as error:
        raise ExtractError(str(error)) from error
    return {str(target.site): one for target, one in zip(targets, found, strict=True)}


# -- what a value is made of ---------------------------------------------------------------------


class Columns(dict[str, Any]):
    """The columns of a value by their names, where somebody has made them already."""


def parts(site: str, value: Any) -> Iterator[tuple[str, Tensor | Rows]]:
    """The columns of a value: the site itself for a tensor, ``site[leaf]`` for each tensor inside another value."""
    if isinstance(value, Columns):
        yield from value.items()
    elif isinstance(value, Tensor):
        yield site, Rows(value.unbind()) if value.is_nested else value
    elif isinstance(value, Rows):
        yield site, value
    else:
        for address, leaf in tree.leaves(value):
            if isinstance(leaf, Tensor):
                yield f"{site}[{address}]", leaf
