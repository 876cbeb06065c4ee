"""The catalogue of edits: what a session may do to a passing value before the model goes on with it.

An edit is any function ``f(value)`` or ``f(value, site)`` that returns the new value, or ``None`` to leave the
value as it is. Those here never write to the value itself. On a nested value, ``zero``, ``scale``, ``clamp``,
``noise`` and ``mean`` change every floating-point tensor; the others need to be told which one with ``at``. Where there
is none, as before an embedding, ``zero`` and ``clamp`` change the integers; the others refuse.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook.errors import EditError


class Edit(Protocol):
    """What an edit looks like; a plain function of one or two arguments is enough."""

    def __call__(self, value: Any, site: Site, /) -> Any: ...


def replace(new: Any) -> Edit:
    """Put ``new`` in the place of the value; a tensor or number is broadcast to its shape.

    >>> replace(1.0)(torch.zeros(2), Site("fc"))
    tensor([1., 1.])
    """

    def edit(value: Any, site: Site) -> Any:
        if isinstance(new, (Tensor, int, float)):
            return _change_one(lambda t: _like(new, t, site).expand_as(t).clone(), value, site, "replace")
        return tree.map_tensors(torch.clone, new)  # the model may write to it

    return _named(edit, "replace", new)


def add(vector: Tensor | float) -> Edit:
    """Add a tensor or number, broadcast from the right: a steering vector to a residual stream."""

    def edit(value: Any, site: Site) -> Any:
        return _change_one(lambda t: t + _like(vector, t, site), value, site, "add")

    return _named(edit, "add", vector)


def scale(factor: float) -> Edit:
    """Multiply by a number."""
    return _named(_change_all(lambda t: t * factor, "scale"), "scale", factor)


def zero() -> Edit:
    """Put zeros in the place of the value: ablate the site."""
    return _named(_change_all(torch.zeros_like, "zero", integers=True), "zero")


def mean(dim: int | Sequence[int] = 0) -> Edit:
    """Put its mean over ``dim`` (the batch, unless said otherwise) in the place of the value."""
    over = dim if isinstance(dim, int) else tuple(dim)
    return _named(_change_all(lambda t: t.mean(dim=over, keepdim=True).expand_as(t).clone(), "mean"), "mean", dim)


def clamp(low: float | None = None, high: float | None = None) -> Edit:
    """Limit every element to ``[low, high]``."""
    if low is None and high is None:
        raise ValueError("edits.clamp needs a low limit, a high limit or both.")
    return _named(_change_all(lambda t: t.clamp(low, high), "clamp", integers=True), "clamp", low, high)


def noise(std: float, seed: int = 0) -> Edit:
    """Add Gaussian noise, another for every site and call, without touching the model's random numbers.

    The same call gets the same noise again: activation checkpointing computes it twice.
    """

    def edit(value: Any, site: Site) -> Any:
        leaf = count()

        def perturb(tensor: Tensor) -> Tensor:
            key = zlib.crc32(f"{seed} {site} {next(leaf)}".encode())
            generator = torch.Generator(tensor.device).manual_seed(key)
            drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            return tensor + (std * drawn).to(tensor.dtype)

        return _change_all(perturb, "noise")(value, site)

    return _named(edit, "noise", std)


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

    def edit(value: Any, site: Site) -> Any:
        recorded = _recorded(recording, site, source)
        if positions is None and mask is None:
            return _fit(recorded, value, site)

        def mix(tensor: Tensor) -> Tensor:
            new = _only_tensor(recorded, site, "patch").to(tensor.device, tensor.dtype)
            if new.shape != tensor.shape:
                raise _mismatch(site, "shape", tuple(tensor.shape), tuple(new.shape))
            if mask is not None:
                return torch.where(mask.to(tensor.device), new, tensor)
            index: list[Any] = [slice(None)] * tensor.dim()
            index[dim] = positions
            result = tensor.clone()
            result[tuple(index)] = new[tuple(index)]
            return result

        return _change_one(mix, value, site, "patch")

    return _named(edit, "patch", *([] if positions is None else [positions]))


def at(leaf: str, edit: Callable[..., Any]) -> Edit:
    """Apply an edit to one leaf of a nested value: ``at("1.0", zero())`` is the first state of an LSTM.

    >>> at("1", add(1.0))((torch.zeros(1), torch.zeros(1)), Site("lstm"))
    (tensor([0.]), tensor([1.]))
    """
    inner = adapt(edit)

    def edit_leaf(value: Any, site: Site) -> Any:
        def change(part: Any) -> Any:
            new = inner(part, site)
            return part if new is None else new

        try:
            return tree.put(value, leaf, change)
        except KeyError as error:
            raise EditError(f"{site}: edits.at({leaf!r}): {error.args[0]}") from None

    return _named(edit_leaf, "at", leaf, edit)


# -- for the session ----------------------------------------------------------------------------

_MAKERS = (replace, add, scale, zero, mean, clamp, noise, patch, at)


def adapt(edit: Any) -> Edit:
    """An edit that takes value and site, whatever the function it is made of takes; a sequence runs in order."""
    if isinstance(edit, (list, tuple)):
        steps = [adapt(step) for step in edit]

        def all_steps(value: Any, site: Site) -> Any:
            for step in steps:
                new = step(value, site)
                value = value if new is None else new
            return value

        return all_steps
    if any(edit is maker for maker in _MAKERS):
        raise EditError(f"edits.{edit.__name__} makes an edit when it is called: write edits.{edit.__name__}(…).")
    if not callable(edit):
        raise EditError(
            f"{edit!r} is not an edit. Use one of torchhook.edits (edits.replace(value) puts a value in), "
            "or a function f(value) or f(value, site)."
        )
    return edit if _wants_site(edit) else lambda value, site: edit(value)


def _wants_site(edit: Callable[..., Any]) -> bool:
    """Whether a function takes the site: as its second argument, unless that has a default of its own."""
    try:
        signature = inspect.signature(edit.forward if isinstance(edit, torch.nn.Module) else edit)
    except ValueError:  # a builtin without a signature
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind in places]
    return len(parameters) > 1 and (parameters[1].default is inspect.Parameter.empty or parameters[1].name == "site")


def check(old: Any, new: Any, site: Site) -> None:
    """Refuse an edit that changes the structure of a value, or the shape, dtype or device of a tensor in it."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
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
    if new.dtype != old.dtype:
        raise _mismatch(site, "dtype", old.dtype, new.dtype)
    if new.device != old.device:
        raise _mismatch(site, "device", old.device, new.device)


def _mismatch(site: Site, what: str, expected: object, found: object) -> EditError:
    return EditError(
        f"{str(site) or '(model)'}: the edit changes the {what}: expected {expected}, found {found}. "
        "Return a value like the one that passes."
    )


# -- how the catalogue changes values -------------------------------------------------------------


def _change_all(change: Callable[[Tensor], Tensor], name: str, integers: bool = False) -> Edit:
    """Change every floating-point tensor: indices and sizes beside them stay valid. Only a value without any is
    changed in its ``integers``, if the edit makes sense of those; one that would stay as it is, is refused.
    """

    def edit(value: Any, site: Site) -> Any:
        found = list(tree.tensors(value))
        floats = any(_is_float(t) for t in found)
        if not floats and not (integers and found):
            kinds = "floating-point tensors" if not integers else "tensors"
            raise EditError(
                f"{str(site) or '(model)'}: edits.{name} changes {kinds}, and this value has none: {_kind(value)}"
                f"{''.join(f', {t.dtype}' for t in found[:4])}."
            )
        return tree.map_tensors(lambda t: change(t) if not floats or _is_float(t) else t, value)

    return edit


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _change_one(change: Callable[[Tensor], Tensor], value: Any, site: Site, name: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    found = [address for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    if len(found) != 1:
        listed = ", ".join(map(repr, found[:6])) or "none"
        raise EditError(
            f"{str(site) or '(model)'}: edits.{name} changes one tensor, and this value has {len(found)}: {listed}. "
            f"Name one with edits.at({found[0] if found else '…'!r}, edits.{name}(…))."
        )
    return tree.put(value, found[0], change)


def _like(new: Tensor | float, old: Tensor, site: Site) -> Tensor:
    """``new`` in the dtype and on the device of ``old``, checked to broadcast to its shape."""
    given = torch.as_tensor(new)
    if not torch.can_cast(given.dtype, old.dtype):
        raise _mismatch(site, "dtype", old.dtype, given.dtype)
    tensor = given.to(old.device, old.dtype)
    try:
        if torch.broadcast_shapes(tensor.shape, old.shape) == old.shape:
            return tensor
    except RuntimeError:
        pass
    raise _mismatch(site, "shape", tuple(old.shape), tuple(tensor.shape))


def _recorded(recording: Recording, site: Site, source: str | None) -> Any:
    if source is not None:
        return recording[source]
    return recording[site] if site in recording else recording[site.every_call]


def _fit(recorded: Any, value: Any, site: Site) -> Any:
    """The passing value with the recorded tensors in the place of its own, as copies: the model may write to them."""
    before, after = list(tree.tensors(value)), list(tree.tensors(recorded))
    if len(before) != len(after):
        raise _mismatch(site, "structure", _kind(value), _kind(recorded))
    fitted = (new.to(old.device, old.dtype, copy=True) for old, new in zip(before, after, strict=True))
    return tree.with_tensors(value, fitted)


def _only_tensor(recorded: Any, site: Site, name: str) -> Tensor:
    found: list[Tensor] = list(tree.tensors(recorded))
    if len(found) != 1:
        raise EditError(f"{site}: edits.{name} needs one recorded tensor, found {tree.describe(recorded)}.")
    return found[0]


def _named(edit: Edit, name: str, *parameters: Any) -> Edit:
    shown = ", ".join(tree.describe(p) if isinstance(p, Tensor) else repr(p) for p in parameters)
    edit.__name__ = edit.__qualname__ = f"edits.{name}({shown})"  # type: ignore[attr-defined]
    return edit
