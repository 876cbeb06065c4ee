"""How the catalogue changes values: which tensors of one, and what has to stay as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook._recording.address import Site
from torchhook._values import elements, tree
from torchhook._values.subclasses import placed_like, shape, traits, with_rows
from torchhook._values.wrappers import ORDINARY, like, through_numbers
from torchhook.errors import EditError


def check(old: Any, new: Any, site: Site) -> None:
    """Refuse an edit that changes the structure of a value, or the shape, dtype or device of a tensor in it."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):  # nearly always: no tree to walk
        _check_tensor(old, new, site)
        return
    if not tree.same_structure(old, new):
        raise mismatch(site, "structure", _kind(old), _kind(new))
    for (address, was), (_, now) in zip(tree.leaves(old), tree.leaves(new), strict=True):
        if isinstance(was, Tensor):
            if not isinstance(now, Tensor):
                raise mismatch(site, f"leaf {address!r}" if address else "value", tree.describe(was), repr(now))
            _check_tensor(was, now, site)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {tree.describe(value)}"


def _check_tensor(old: Tensor, new: Tensor, site: Site) -> None:
    if _are_plain(old, new) and old.shape == new.shape and old.dtype == new.dtype and old.device == new.device:
        return  # as nearly always: all that traits would tell
    for (what, was), now in zip(traits(old).items(), traits(new).values(), strict=True):
        if was != now:
            raise mismatch(site, what, was, now)


def _are_plain(one: Any, other: Any) -> bool:
    """Whether both are tensors that are no more than their numbers, in rows of one length."""
    return type(one) in ORDINARY and type(other) in ORDINARY and not (one.is_nested or other.is_nested)


_RETURN = "Return a value like the one that passes."
_RECORD = "Patch with what was recorded for inputs of the same sizes."
_NESTED = "A nested tensor fits one with the same rows only."


def mismatch(site: Site, what: str, expected: object, found: object, way: str = _RETURN) -> EditError:
    return EditError(f"{site.shown}: the edit changes the {what}: expected {expected}, found {found}. {way}")


def other_record(site: Site, what: str, expected: object, found: object) -> EditError:
    """What was recorded is unlike the value that it is to take the place of."""
    return mismatch(site, what, expected, found, _RECORD)


def _misfit(site: Site, name: str, what: str, expected: object, found: object, way: str) -> EditError:
    """A tensor or number that was given to an edit does not fit the value: nobody has returned anything."""
    return EditError(
        f"{site.shown}: the {what} of what edits.{name} was given does not fit the value that passes: expected "
        f"{expected}, found {found}. {way}"
    )


def change_all(
    change: Callable[[Tensor], Tensor],
    value: Any,
    site: Site,
    name: str,
    integers: bool = False,
    by_rows: bool = False,
) -> Any:
    """Change every floating-point tensor: indices and sizes beside them stay valid. Only a value without any is
    changed in its ``integers``, if the edit makes sense of those; one that would stay as it is, is refused. A change
    that asks for the shape is made ``by_rows`` where a tensor is nested and has none.
    """
    found = list(tree.tensors(value))
    floats = any(_is_float(t) for t in found)
    if not floats and not (integers and found):
        raise EditError(
            f"{site.shown}: edits.{name} changes {'' if integers else 'floating-point '}tensors, and this value has "
            f"none: {_kind(value)}"
            f"{''.join(f', {t.dtype}' for t in found[:4])}."
        )
    return tree.map_tensors(lambda t: _changed(change, t, by_rows) if not floats or _is_float(t) else t, value)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def _changed(change: Callable[[Tensor], Tensor], tensor: Tensor, by_rows: bool) -> Tensor:
    # A jagged tensor has most operations and a shape without numbers; of the older layout, few operations and no shape.
    if tensor.is_nested and (by_rows or tensor.layout == torch.strided):
        return with_rows(change, tensor)
    return placed_like(through_numbers(change, tensor), tensor)


def change_one(change: Callable[[Tensor], Tensor], value: Any, site: Site, name: str, by_rows: bool = False) -> Any:
    """Change the one tensor of a value, ``by_rows`` as in ``change_all``."""
    if isinstance(value, Tensor):
        return _changed(change, value, by_rows)
    found = [address for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    if len(found) != 1:
        listed = ", ".join(map(repr, found[:6])) or "none"
        raise EditError(
            f"{site.shown}: edits.{name} changes one tensor, and this value has {len(found)}: {listed}. "
            f"Name one with edits.at({found[0] if found else '…'!r}, edits.{name}(…))."
        )
    return tree.put(value, found[0], lambda tensor: _changed(change, tensor, by_rows))


def fitting(new: Tensor | float, old: Tensor, site: Site, name: str) -> Tensor:
    """``new`` in the dtype and on the device of ``old``, checked to broadcast to its shape; the edit's name is told."""
    if isinstance(new, Tensor) and _are_plain(new, old) and new.dtype == old.dtype and new.device == old.device:
        tensor = new  # as nearly always: what follows would not change it
    else:
        given = torch.as_tensor(new)
        if given.is_nested and not old.is_nested:
            raise _misfit(site, name, "shape", shape(old), shape(given), _NESTED)
        if not elements.can_cast(given.dtype, old.dtype):  # 0.5 among integers would become 0 without a word
            raise _misfit(site, name, "dtype", old.dtype, given.dtype, "Give one that this dtype can hold.")
        tensor = placed_like(given.to(old.device, old.dtype), old)
    if broadcasts(tensor.shape, old.shape):
        return tensor
    raise _misfit(site, name, "shape", shape(old), shape(tensor), "Give one that broadcasts to it.")


def broadcasts(given: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of one shape can be broadcast to another.

    >>> broadcasts(torch.Size([1, 4]), torch.Size([3, 4])), broadcasts(torch.Size([3, 4]), torch.Size([1, 4]))
    (True, False)
    """
    # Not torch.broadcast_shapes: it takes ten times as long as the edit itself.
    if len(given) > len(to):
        return False
    last = to[len(to) - len(given) :]
    return given == last or all(size in (1, wanted) for size, wanted in zip(given, last, strict=True))


def with_nested(new: Tensor, value: Any, site: Site) -> Any:
    """The value with a copy of a nested tensor in the place of its one tensor."""
    for tensor in tree.tensors(value):
        if shape(tensor) != shape(new):
            raise _misfit(site, "replace", "shape", shape(tensor), shape(new), _NESTED)
    rows = iter(new.unbind())
    return change_one(lambda row: like(next(rows), row), value, site, "replace", by_rows=True)


def refuse_nested(value: Any, site: Site, name: str) -> None:
    """Refuse an edit that means one place in all rows where rows have lengths of their own."""
    if any(tensor.is_nested for tensor in tree.tensors(value)):
        raise EditError(f"{site.shown}: edits.{name} needs dims that all rows share, and this value is nested.")


def with_recorded(recorded: Any, value: Any, site: Site) -> Any:
    """The passing value with the recorded tensors in the place of its own, as copies: the model may write to them."""
    before, after = list(tree.tensors(value)), list(tree.tensors(recorded))
    if len(before) != len(after):  # their classes may differ: a loaded recording has others
        raise other_record(site, "structure", _kind(value), _kind(recorded))
    for old, new in zip(before, after, strict=True):
        if shape(old) != shape(new):
            raise other_record(site, "shape", shape(old), shape(new))
    fitted = (placed_like(like(new, old), old) for old, new in zip(before, after, strict=True))
    return tree.with_tensors(value, fitted)
