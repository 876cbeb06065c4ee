"""The edits that come with the library: makers, and the values that they make."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import parts, tree
from torchhook._values.choices import Along, Which, choice
from torchhook._values.heads import UNKNOWN, KnownHeads, NoPart
from torchhook._values.parts import Part
from torchhook._values.subclasses import placed_like, shape
from torchhook._values.wrappers import is_fake, like
from torchhook.edits.adapting import adapt
from torchhook.edits.changing import (
    broadcasts,
    change_all,
    change_one,
    check,
    fitting,
    other_record,
    refuse_nested,
    with_nested,
    with_recorded,
)
from torchhook.edits.protocol import CataloguedEdit, Edit, StepsToCome, asks_step, placed, steps_to_come
from torchhook.errors import EditError


def replace(new: Any) -> Edit:
    """Put ``new`` in the place of the value; a tensor or number is broadcast to its shape.

    >>> replace(1.0)(torch.zeros(2), Site("fc"))
    tensor([1., 1.])
    """
    return _Replace(new)


@dataclass(frozen=True, eq=False, repr=False)
class _Replace(CataloguedEdit):
    new: Any

    def __call__(self, value: Any, site: Site) -> Any:
        new = self.new
        if isinstance(new, Tensor) and new.is_nested:
            return with_nested(new, value, site)
        if isinstance(new, (Tensor, int, float)):
            return change_one(
                lambda t: like(fitting(new, t, site, "replace").expand_as(t), t), value, site, "replace", True
            )
        return tree.map_tensors(torch.clone, new)  # the model may write to it

    def within(self, part: Part, whole: Tensor) -> Edit:
        return lambda value, site: _Replace(part.fitted(self.new, value))(value, site)


def add(vector: Tensor | float) -> Edit:
    """Add a tensor or number, broadcast from the right: a steering vector to a residual stream.

    >>> add(torch.tensor([1.0, 2.0]))(torch.zeros(1, 2), Site("h.3"))
    tensor([[1., 2.]])
    """
    return _Add(vector)


@dataclass(frozen=True, eq=False, repr=False)
class _Add(CataloguedEdit):
    vector: Tensor | float

    def __call__(self, value: Any, site: Site) -> Any:
        return change_one(lambda t: t + fitting(self.vector, t, site, "add"), value, site, "add")

    def within(self, part: Part, whole: Tensor) -> Edit:
        return lambda value, site: _Add(part.fitted(self.vector, value))(value, site)


def scale(factor: float) -> Edit:
    """Multiply by a number."""
    return _Scale(factor)


@dataclass(frozen=True, eq=False, repr=False)
class _Scale(CataloguedEdit):
    factor: float

    def __call__(self, value: Any, site: Site) -> Any:
        return change_all(lambda t: t * self.factor, value, site, "scale")


def zero() -> Edit:
    """Put zeros in the place of the value: ablate the site."""
    return _Zero()


@dataclass(frozen=True, eq=False, repr=False)
class _Zero(CataloguedEdit):
    def __call__(self, value: Any, site: Site) -> Any:
        return change_all(torch.zeros_like, value, site, "zero", integers=True)


def mean(dim: int | Sequence[int] = 0) -> Edit:
    """Put its mean over ``dim`` (the batch, unless said otherwise) in the place of the value."""
    return _Mean(dim if isinstance(dim, int) else tuple(dim))


@dataclass(frozen=True, eq=False, repr=False)
class _Mean(CataloguedEdit):
    dim: int | tuple[int, ...] = 0

    def __call__(self, value: Any, site: Site) -> Any:
        refuse_nested(value, site, "mean")
        return change_all(lambda t: t.mean(dim=self.dim, keepdim=True).expand_as(t).clone(), value, site, "mean")


def clamp(low: float | None = None, high: float | None = None) -> Edit:
    """Limit every element to ``[low, high]``."""
    if low is None and high is None:
        raise ValueError("edits.clamp needs a low limit, a high limit or both.")
    return _Clamp(low, high)


@dataclass(frozen=True, eq=False, repr=False)
class _Clamp(CataloguedEdit):
    low: float | None = None
    high: float | None = None

    def __call__(self, value: Any, site: Site) -> Any:
        return change_all(lambda t: t.clamp(self.low, self.high), value, site, "clamp", integers=True)


def noise(std: float, seed: int = 0) -> Edit:
    """Add Gaussian noise, another for every site and call, without touching the model's random numbers.

    The same call gets the same noise again: activation checkpointing computes it twice.
    """
    return _Noise(std, seed=seed)


@dataclass(frozen=True, eq=False, repr=False)
class _Noise(CataloguedEdit):
    std: float
    seed: int = field(default=0, kw_only=True)

    def __call__(self, value: Any, site: Site) -> Any:
        leaf = count()  # each tensor of a value gets noise of its own

        def perturb(tensor: Tensor) -> Tensor:
            key = zlib.crc32(f"{self.seed} {site} {next(leaf)}".encode())  # hash() differs between processes
            if is_fake(tensor):  # no device to draw on, and nothing to draw
                return tensor.clone()
            generator = torch.Generator(tensor.device).manual_seed(key)
            # In single precision whatever the tensor has: not every dtype can be drawn.
            drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            return tensor + placed_like((self.std * drawn).to(tensor.dtype), tensor)

        return change_all(perturb, value, site, "noise", by_rows=True)


def patch(
    recording: Recording,
    positions: Which = None,
    *,
    mask: Tensor | None = None,
    source: str | None = None,
    dim: int | None = None,
) -> Edit:
    """Put in what ``recording`` holds for this site and call: activation patching.

    ``positions`` restricts it to some tokens, chosen as in ``edits.only``, ``mask`` to where a boolean tensor is true.
    ``source`` takes the value of another site instead. Tokens are dim 1, and where the modules around say that heads
    are there (``@q``, ``@k``, ``@v``, what attention takes and gives), dim 2; ``dim`` names another one, whose indices
    ``positions`` then are.
    """
    if not isinstance(recording, Recording):
        raise TypeError(
            f"edits.patch puts in what a recording holds, found {type(recording).__name__}: give what th.capture, "
            "th.run or th.load returned. edits.replace(value) puts a value in."
        )
    if positions is not None and mask is not None:
        raise ValueError("edits.patch takes positions= or mask=, not both.")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        found = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"edits.patch(…, mask=): give a tensor of booleans, found {found}.")
    return _Patch(recording, positions, mask=mask, source=source, dim=dim)


@dataclass(frozen=True, eq=False, repr=False)
class _Patch(CataloguedEdit):
    recording: Recording
    positions: Any = None
    _: KW_ONLY
    mask: Tensor | None = None
    source: str | None = None
    dim: int | None = None

    def __post_init__(self) -> None:  # here, for a file may hold it as it was written
        if isinstance(self.positions, Along):
            raise TypeError("edits.patch(…, positions=): name the dim with dim=, and not with edits.along.")
        object.__setattr__(self, "positions", choice(self.positions, "positions", lines=True))

    def __call__(self, value: Any, site: Site) -> Any:
        return self.apply(value, site, UNKNOWN)

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        return self if self.positions is None or self.dim is not None else _PlacedPatch(self, known())

    def apply(self, value: Any, site: Site, known: KnownHeads) -> Any:
        """Patch a value at a site where this much is known of the heads."""
        here = site if site in self.recording else site.every_call  # one recorded call serves them all
        recorded = self.recording[here if self.source is None else self.source]
        if self.positions is None and self.mask is None:
            return with_recorded(recorded, value, site)
        refuse_nested(value, site, "patch with positions= or mask=")
        found = list(tree.tensors(recorded))
        if len(found) != 1:
            raise EditError(f"{site.shown}: edits.patch needs one recorded tensor, found {tree.describe(recorded)}.")

        def mix(tensor: Tensor) -> Tensor:
            new = placed_like(like(found[0], tensor), tensor)
            if new.shape != tensor.shape:
                raise other_record(site, "shape", tuple(tensor.shape), tuple(new.shape))
            if self.mask is not None:
                return self._masked(self.mask, tensor, new, site)
            chosen = self._part(tensor, site, known)
            return chosen.put(tensor, chosen.of(new))

        return change_one(mix, value, site, "patch")

    def _masked(self, mask: Tensor, tensor: Tensor, new: Tensor, site: Site) -> Tensor:
        if not broadcasts(mask.shape, tensor.shape):
            way = " A mask of rows and tokens is positions=mask." if mask.dim() == 2 and tensor.dim() > 2 else ""
            raise EditError(
                f"{site.shown}: edits.patch(…, mask=): a mask of shape {tuple(mask.shape)} does not fit the value, of "
                f"shape {shape(tensor)}.{way}"
            )
        return torch.where(placed_like(mask.to(tensor.device), tensor), new, tensor)

    def _part(self, tensor: Tensor, site: Site, known: KnownHeads) -> Part:
        positions = self.positions if self.dim is None else Along(self.positions, self.dim)
        try:
            return parts.part(tensor, positions=positions, known=known, otherwise=1)
        except NoPart as error:
            way = " Name the dim of the tokens: dim=…." if error.way else ""
            raise EditError(f"{site.shown}: edits.patch(…, positions=…): {error.why}{way}") from None

    def within(self, part: Part, whole: Tensor) -> Edit:
        return _patched_within(self, part, whole)

    def parts(self) -> dict[str, Any]:
        records = [(record.site.parts, record.call, record.value) for record in self.recording.records()]
        return super().parts() | {"recording": records}  # a recording itself is only equal to itself

    def __hash__(self) -> int:  # the recording may still be filling
        return hash((_Patch, self.source, self.dim))


@dataclass(frozen=True, eq=False, repr=False)
class _PlacedPatch(CataloguedEdit):
    """A patch of tokens in a session, where the modules around are known."""

    edit: _Patch
    known: KnownHeads

    def __call__(self, value: Any, site: Site) -> Any:
        return self.edit.apply(value, site, self.known)

    def within(self, part: Part, whole: Tensor) -> Edit:
        return _patched_within(self, part, whole)

    def __repr__(self) -> str:
        return repr(self.edit)


def _patched_within(patch: Edit, part: Part, whole: Tensor) -> Edit:
    # As the whole it is compared with what was recorded; the part may have been changed by an edit before.
    def patched(value: Any, site: Site) -> Any:
        before = part.put(whole, value)
        after = patch(before, site)
        check(before, after, site)
        return part.of(after)

    return patched


def at(leaf: str, edit: Callable[..., Any]) -> Edit:
    """Apply an edit, or several in order, to one leaf of a nested value: ``"1.0"`` is the first state of an LSTM.

    >>> at("1", [add(1.0), scale(3)])((torch.zeros(1), torch.zeros(1)), Site("lstm"))
    (tensor([0.]), tensor([3.]))
    """
    return At(str(leaf), adapt(edit))


@dataclass(frozen=True, eq=False, repr=False)
class At(CataloguedEdit):
    leaf: str
    edit: Edit

    def __call__(self, value: Any, site: Site) -> Any:
        def change(part: Any) -> Any:
            new = self.edit(part, site)
            return part if new is None else new

        try:
            return tree.put(value, self.leaf, change)
        except KeyError as error:
            raise EditError(f"{site.shown}: edits.at({self.leaf!r}): {error.args[0]}") from None

    @property
    def asks_step(self) -> bool:  # type: ignore[override]
        return asks_step(self.edit)

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        return At(self.leaf, placed(self.edit, site, known))

    def steps_to_come(self) -> Iterator[StepsToCome]:
        return steps_to_come(self.edit)


_PLAIN = (_Replace, _Add, _Scale, _Zero, _Mean, _Clamp, _Noise, _Patch)
KINDS = (*_PLAIN, At)
"""The edits themselves: a file of edits holds these."""


def is_same_in_every_step(edit: Edit) -> bool:
    """Whether an edit surely asks for no step of a generation; a function may do so by an edit that it calls."""
    while type(edit) is At:
        edit = edit.edit
    return type(edit) in _PLAIN and not asks_step(edit)
