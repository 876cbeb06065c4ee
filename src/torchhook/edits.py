"""The catalogue of edits: what a session may do to a passing value before the model goes on with it.

An edit is any function ``f(value)`` or ``f(value, site)`` that returns the new value, or ``None`` to leave the
value as it is. Those here never write to the value itself. On a nested value, ``zero``, ``scale``, ``clamp``,
``noise`` and ``mean`` change every floating-point tensor; the others need to be told which one with ``at``. Where there
is none, as before an embedding, ``zero`` and ``clamp`` change the integers; the others refuse.

They are values: they print as they were written, compare by what they hold, and pickle.

>>> add(torch.ones(768)) == add(torch.ones(768)), [scale(2), at("0", zero())]
(True, [edits.scale(2), edits.at('0', edits.zero())])
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import elements, tree
from torchhook._values.value_object import ValueObject, shown
from torchhook.errors import EditError

__all__ = ["Edit", "add", "at", "clamp", "mean", "noise", "patch", "replace", "scale", "zero"]


class Edit(Protocol):
    """Takes a passing value and the site that it passes, and returns the value to go on with, or ``None`` for the same.

    A plain function is enough, also one of the value alone. The new value must be like the old one: the same
    structure, shapes, dtypes and devices.

    >>> def louder(value: Tensor, site: Site) -> Tensor:
    ...     return value * 2 if site.call == 0 else value
    >>> edit: Edit = louder
    """

    def __call__(self, value: Any, site: Site, /) -> Any: ...


class _Edit(ValueObject):
    room = "edits."


def replace(new: Any) -> Edit:
    """Put ``new`` in the place of the value; a tensor or number is broadcast to its shape.

    >>> replace(1.0)(torch.zeros(2), Site("fc"))
    tensor([1., 1.])
    """
    return _Replace(new)


@dataclass(frozen=True, eq=False, repr=False)
class _Replace(_Edit):
    new: Any

    def __call__(self, value: Any, site: Site) -> Any:
        new = self.new
        if isinstance(new, (Tensor, int, float)):
            return _change_one(lambda t: _like(new, t, site).expand_as(t).clone(), value, site, "replace")
        return tree.map_tensors(torch.clone, new)  # the model may write to it


def add(vector: Tensor | float) -> Edit:
    """Add a tensor or number, broadcast from the right: a steering vector to a residual stream.

    >>> add(torch.tensor([1.0, 2.0]))(torch.zeros(1, 2), Site("h.3"))
    tensor([[1., 2.]])
    """
    return _Add(vector)


@dataclass(frozen=True, eq=False, repr=False)
class _Add(_Edit):
    vector: Tensor | float

    def __call__(self, value: Any, site: Site) -> Any:
        return _change_one(lambda t: t + _like(self.vector, t, site), value, site, "add")


def scale(factor: float) -> Edit:
    """Multiply by a number."""
    return _Scale(factor)


@dataclass(frozen=True, eq=False, repr=False)
class _Scale(_Edit):
    factor: float

    def __call__(self, value: Any, site: Site) -> Any:
        return _change_all(lambda t: t * self.factor, value, site, "scale")


def zero() -> Edit:
    """Put zeros in the place of the value: ablate the site."""
    return _Zero()


@dataclass(frozen=True, eq=False, repr=False)
class _Zero(_Edit):
    def __call__(self, value: Any, site: Site) -> Any:
        return _change_all(torch.zeros_like, value, site, "zero", integers=True)


def mean(dim: int | Sequence[int] = 0) -> Edit:
    """Put its mean over ``dim`` (the batch, unless said otherwise) in the place of the value."""
    return _Mean(dim if isinstance(dim, int) else tuple(dim))


@dataclass(frozen=True, eq=False, repr=False)
class _Mean(_Edit):
    dim: int | tuple[int, ...] = 0

    def __call__(self, value: Any, site: Site) -> Any:
        return _change_all(lambda t: t.mean(dim=self.dim, keepdim=True).expand_as(t).clone(), value, site, "mean")


def clamp(low: float | None = None, high: float | None = None) -> Edit:
    """Limit every element to ``[low, high]``."""
    if low is None and high is None:
        raise ValueError("edits.clamp needs a low limit, a high limit or both.")
    return _Clamp(low, high)


@dataclass(frozen=True, eq=False, repr=False)
class _Clamp(_Edit):
    low: float | None = None
    high: float | None = None

    def __call__(self, value: Any, site: Site) -> Any:
        return _change_all(lambda t: t.clamp(self.low, self.high), value, site, "clamp", integers=True)


def noise(std: float, seed: int = 0) -> Edit:
    """Add Gaussian noise, another for every site and call, without touching the model's random numbers.

    The same call gets the same noise again: activation checkpointing computes it twice.
    """
    return _Noise(std, seed=seed)


@dataclass(frozen=True, eq=False, repr=False)
class _Noise(_Edit):
    std: float
    seed: int = field(default=0, kw_only=True)

    def __call__(self, value: Any, site: Site) -> Any:
        leaf = count()  # each tensor of a value gets noise of its own

        def perturb(tensor: Tensor) -> Tensor:
            key = zlib.crc32(f"{self.seed} {site} {next(leaf)}".encode())  # hash() differs between processes
            generator = torch.Generator(tensor.device).manual_seed(key)
            # In single precision whatever the tensor has: not every dtype can be drawn.
            drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            return tensor + (self.std * drawn).to(tensor.dtype)

        return _change_all(perturb, value, site, "noise")


def patch(
    recording: Recording,
    positions: int | slice | Sequence[int] | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    source: str | None = None,
    dim: int = 1,
) -> Edit:
    """Put in what ``recording`` holds for this site and call: activation patching.

    ``positions`` restricts it to some indices of ``dim`` (the tokens of a batch-first sequence), ``mask`` to where a
    boolean tensor is true. ``source`` takes the value of another site instead.
    """
    if positions is not None and mask is not None:
        raise ValueError("edits.patch takes positions= or mask=, not both.")
    return _Patch(recording, positions, mask=mask, source=source, dim=dim)


@dataclass(frozen=True, eq=False, repr=False)
class _Patch(_Edit):
    recording: Recording
    positions: int | slice | Sequence[int] | Tensor | None = None
    _: KW_ONLY
    mask: Tensor | None = None
    source: str | None = None
    dim: int = 1

    def __call__(self, value: Any, site: Site) -> Any:
        here = site if site in self.recording else site.every_call  # one recorded call serves them all
        recorded = self.recording[here if self.source is None else self.source]
        if self.positions is None and self.mask is None:
            return _fit(recorded, value, site)
        found = list(tree.tensors(recorded))
        if len(found) != 1:
            raise EditError(f"{site.shown}: edits.patch needs one recorded tensor, found {tree.describe(recorded)}.")

        def mix(tensor: Tensor) -> Tensor:
            new = found[0].to(tensor.device, tensor.dtype)
            if new.shape != tensor.shape:
                raise _mismatch(site, "shape", tuple(tensor.shape), tuple(new.shape))
            if self.mask is not None:
                return torch.where(self.mask.to(tensor.device), new, tensor)
            index: list[Any] = [slice(None)] * tensor.dim()
            index[self.dim] = self.positions
            result = tensor.clone()
            result[tuple(index)] = new[tuple(index)]
            return result

        return _change_one(mix, value, site, "patch")

    def parts(self) -> dict[str, Any]:
        records = [(record.site.parts, record.call, record.value) for record in self.recording.records()]
        return super().parts() | {"recording": records}  # a recording itself is only equal to itself

    def __hash__(self) -> int:  # the recording may still be filling
        return hash((_Patch, self.source, self.dim))


def at(leaf: str, edit: Callable[..., Any]) -> Edit:
    """Apply an edit, or several in order, to one leaf of a nested value: ``"1.0"`` is the first state of an LSTM.

    >>> at("1", [add(1.0), scale(3)])((torch.zeros(1), torch.zeros(1)), Site("lstm"))
    (tensor([0.]), tensor([3.]))
    """
    return _At(str(leaf), adapt(edit))


@dataclass(frozen=True, eq=False, repr=False)
class _At(_Edit):
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


# -- for the session ----------------------------------------------------------------------------

_MAKERS = (replace, add, scale, zero, mean, clamp, noise, patch, at)  # callable, so each would pass as a user's edit


def adapt(edit: Any) -> Edit:
    """An edit that takes value and site, whatever the function it is made of takes; a sequence runs in order."""
    if isinstance(edit, (list, tuple)):
        return _Steps(tuple(adapt(step) for step in edit))
    if any(edit is maker for maker in _MAKERS):
        raise EditError(f"edits.{edit.__name__} makes an edit when it is called: write edits.{edit.__name__}(…).")
    if not callable(edit):
        raise EditError(
            f"{edit!r} is not an edit. Use one of torchhook.edits (edits.replace(value) puts a value in), "
            "or a function f(value) or f(value, site)."
        )
    return edit if isinstance(edit, _Edit) or _wants_site(edit) else _OfValue(edit)


@dataclass(frozen=True, eq=False, repr=False)
class _Steps(_Edit):
    """Several edits, one after the other."""

    steps: tuple[Edit, ...]

    def __call__(self, value: Any, site: Site) -> Any:
        for step in self.steps:
            new = step(value, site)
            value = value if new is None else new
        return value

    def __repr__(self) -> str:
        return shown(list(self.steps))


@dataclass(frozen=True, eq=False, repr=False)
class _OfValue(_Edit):
    """A function that takes the value alone."""

    function: Callable[[Any], Any]

    def __call__(self, value: Any, site: Site) -> Any:
        return self.function(value)

    def __repr__(self) -> str:
        return shown(self.function)


def _wants_site(edit: Callable[..., Any]) -> bool:
    """Whether a function takes the site: as its second argument, unless that has a default of its own."""
    try:
        # A module's own __call__ takes anything.
        signature = inspect.signature(edit.forward if isinstance(edit, torch.nn.Module) else edit)
    except ValueError:  # a builtin without a signature
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind in places]
    return len(parameters) > 1 and (parameters[1].default is inspect.Parameter.empty or parameters[1].name == "site")


def check(old: Any, new: Any, site: Site) -> None:
    """Refuse an edit that changes the structure of a value, or the shape, dtype or device of a tensor in it."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):  # nearly always: no tree to walk
        _check_tensor(old, new, site)
        return
    if not tree.same_structure(old, new):
        raise _mismatch(site, "structure", _kind(old), _kind(new))
    for (address, was), (_, now) in zip(tree.leaves(old), tree.leaves(new), strict=True):
        if isinstance(was, Tensor):
            if not isinstance(now, Tensor):
                raise _mismatch(site, f"leaf {address!r}" if address else "value", tree.describe(was), repr(now))
            _check_tensor(was, now, site)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {tree.describe(value)}"


def _check_tensor(old: Tensor, new: Tensor, site: Site) -> None:
    if new.shape != old.shape:
        raise _mismatch(site, "shape", tuple(old.shape), tuple(new.shape))
    for what in ("dtype", "device"):
        if getattr(new, what) != getattr(old, what):
            raise _mismatch(site, what, getattr(old, what), getattr(new, what))


def _mismatch(site: Site, what: str, expected: object, found: object) -> EditError:
    return EditError(
        f"{site.shown}: the edit changes the {what}: expected {expected}, found {found}. "
        "Return a value like the one that passes."
    )


# -- how the catalogue changes values -------------------------------------------------------------


def _change_all(change: Callable[[Tensor], Tensor], value: Any, site: Site, name: str, integers: bool = False) -> Any:
    """Change every floating-point tensor: indices and sizes beside them stay valid. Only a value without any is
    changed in its ``integers``, if the edit makes sense of those; one that would stay as it is, is refused.
    """
    found = list(tree.tensors(value))
    floats = any(_is_float(t) for t in found)
    if not floats and not (integers and found):
        kinds = "floating-point tensors" if not integers else "tensors"
        raise EditError(
            f"{site.shown}: edits.{name} changes {kinds}, and this value has none: {_kind(value)}"
            f"{''.join(f', {t.dtype}' for t in found[:4])}."
        )
    return tree.map_tensors(lambda t: change(t) if not floats or _is_float(t) else t, value)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _change_one(change: Callable[[Tensor], Tensor], value: Any, site: Site, name: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    found = [address for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    if len(found) != 1:
        listed = ", ".join(map(repr, found[:6])) or "none"
        raise EditError(
            f"{site.shown}: edits.{name} changes one tensor, and this value has {len(found)}: {listed}. "
            f"Name one with edits.at({found[0] if found else '…'!r}, edits.{name}(…))."
        )
    return tree.put(value, found[0], change)


def _like(new: Tensor | float, old: Tensor, site: Site) -> Tensor:
    """``new`` in the dtype and on the device of ``old``, checked to broadcast to its shape."""
    given = torch.as_tensor(new)
    if not elements.can_cast(given.dtype, old.dtype):  # 0.5 among integers would become 0 without a word
        raise _mismatch(site, "dtype", old.dtype, given.dtype)
    tensor = given.to(old.device, old.dtype)
    try:
        if torch.broadcast_shapes(tensor.shape, old.shape) == old.shape:
            return tensor
    except RuntimeError:
        pass
    raise _mismatch(site, "shape", tuple(old.shape), tuple(tensor.shape))


def _fit(recorded: Any, value: Any, site: Site) -> Any:
    """The passing value with the recorded tensors in the place of its own, as copies: the model may write to them."""
    before, after = list(tree.tensors(value)), list(tree.tensors(recorded))
    if len(before) != len(after):  # their classes may differ: a loaded recording has others
        raise _mismatch(site, "structure", _kind(value), _kind(recorded))
    fitted = (new.to(old.device, old.dtype, copy=True) for old, new in zip(before, after, strict=True))
    return tree.with_tensors(value, fitted)
