"""What a batch means: what the model is called with, and which part of it are ids and labels."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook._words import plural
from torchhook.errors import ExtractError, suggestion

Part: TypeAlias = "str | int | Callable[[Any], Any] | Sequence[Any] | bool | None"
"""A key or position in the batch, a function of the batch, or one value for every row of the data set."""

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MASKS = ("attention_mask", "mask")
_LABELS = ("label", "labels", "target", "targets", "y")
# Even where forward takes them: models of transformers have a parameter for labels, and compute a loss if it is given.
_NOT_INPUTS = frozenset({*_LABELS, "id", "ids", "idx", "index", "path", "paths", "name", "key"})


def is_table(part: Any) -> bool:
    """Whether ids, labels or lengths are one value for every row, rather than a way to find them."""
    return hasattr(part, "__len__") and not isinstance(part, str)


def rows_in(batch: Any) -> int:
    """How many rows a batch has: the length of its first tensor, or of its first list.

    >>> rows_in({"x": torch.zeros(4, 3), "label": torch.zeros(4)})
    4
    """
    for tensor in tree.tensors(batch):
        if tensor.dim():  # a lone number, such as a step, has no rows
            return len(tensor)
    if isinstance(batch, (list, tuple, np.ndarray)):
        return len(batch)
    raise ExtractError(
        f"a batch of the data is {tree.describe(batch)}: without a tensor in it, its rows cannot be counted."
    )


def call_of(batch: Any, model: nn.Module, input_fn: Callable[[Any], Any] | None) -> Inputs:
    """What to call the model with.

    A tensor is the input; of a tuple or list, the first part is, and a mask of it that comes second; a mapping or
    dataclass gives keyword arguments, those that the model's forward takes. What ``input_fn`` returns is taken as it
    is: a tuple is all positional arguments.
    """
    if input_fn is not None:
        made = input_fn(batch)
        if isinstance(made, Inputs):
            return made
        if isinstance(made, tuple):
            return Inputs(made, {})
        return Inputs((), dict(made)) if isinstance(made, Mapping) else Inputs((made,), {})
    fields = fields_of(batch)  # before tuples: a named one is both
    if fields is not None:
        return _keywords(fields, model)
    if isinstance(batch, (tuple, list)) and batch:
        mask = mask_beside(batch)
        wanted = [] if mask is None else [n for n in _MASKS if n in inspect.signature(model.forward).parameters]
        call = call_of(batch[0], model, None)
        return Inputs(call.args, {**call.kwargs, wanted[0]: mask}) if wanted else call
    return Inputs((torch.as_tensor(batch) if isinstance(batch, np.ndarray) else batch,), {})


@contextlib.contextmanager
def explaining(batch: Any, model: nn.Module, input_fn: Callable[[Any], Any] | None) -> Iterator[None]:
    """Where the model cannot be called with a batch, say so in terms of the data."""
    try:
        yield
    # Afterwards, not before: hooks of the model's own may change what it is called with.
    except (TypeError, AttributeError) as error:
        made = call_of(batch, model, input_fn)
        if (why := _unfit(made, model)) is not None:
            source = "a batch of the data" if input_fn is None else "what input_fn makes of a batch"
            way = "" if input_fn is not None or not isinstance(batch, (tuple, list)) else (
                " input_fn=tuple calls it with all parts of a batch;"
            )  # fmt: skip
            raise ExtractError(
                f"forward takes {_signature(model)}, and {source} is {tree.describe(batch if not input_fn else made)}, "
                f"of which it was called with {_given(made)}: {why}.{way} input_fn=lambda batch: (…) says what to call "
                "it with."
            ) from error
        texts = [value for value in (*made.args, *made.kwargs.values()) if _is_text(value)]
        if texts and next(iter(tree.tensors(made)), None) is None:
            raise ExtractError(
                f"the rows are texts ({_first(texts[0])!r}, …), and the model takes tensors. Pass what a tokenizer "
                'makes of them, data=tokenizer(texts, padding=True, return_tensors="pt"), or input_fn=lambda texts: '
                'tokenizer(list(texts), padding=True, return_tensors="pt").'
            ) from error
        raise


def _unfit(call: Inputs, model: nn.Module) -> str | None:
    """Why forward cannot be called so, by its signature; ``None`` if it can."""
    try:
        signature = inspect.signature(model.forward)
    except (ValueError, TypeError):  # compiled code has none
        return None
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        return str(error)
    return None


def _signature(model: nn.Module) -> str:
    return ", ".join(map(repr, inspect.signature(model.forward).parameters))


def _given(call: Inputs) -> str:
    positional = f"{len(call.args)} {plural(len(call.args), 'argument')}" if call.args else ""
    return " and ".join(filter(None, (positional, ", ".join(map(repr, call.kwargs)))))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) for one in value)
    )


def _first(text: Any) -> str:
    whole = str(text if isinstance(text, str) else text[0])
    return whole if len(whole) <= 40 else whole[:39] + "…"


def mask_beside(batch: Any) -> Tensor | None:
    """The second part of a batch, if it is the mask of the token ids that are the first.

    Zeros and ones alone may also be token types, or labels: a mask has the same id wherever it is zero.

    >>> mask_beside([torch.tensor([[5, 6], [7, 0]]), torch.tensor([[1, 1], [1, 0]])]).tolist()
    [[1, 1], [1, 0]]
    >>> mask_beside([torch.tensor([[5, 6], [7, 8]]), torch.tensor([[0, 1], [0, 1]])]) is None
    True
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return None
    ids, mask = batch[:2]
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor)) or ids.dim() != 2 or ids.shape != mask.shape:
        return None
    if ids.is_floating_point() or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    under = ids[mask == 0]
    return mask if under.numel() == 0 or bool((under == under[0]).all()) else None


def fields_of(batch: Any) -> dict[str, Any] | None:
    """The parts of a batch by their names, if they have names."""
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    return None


def _keywords(fields: dict[str, Any], model: nn.Module) -> Inputs:
    parameters = inspect.signature(model.forward).parameters
    # What cannot be left out is an input, whatever it is called.
    needed = {name for name, p in parameters.items() if p.default is p.empty and p.kind not in _SEVERAL}
    given = {key: value for key, value in fields.items() if key not in _NOT_INPUTS or key in needed}
    named = {key: value for key, value in given.items() if key in parameters}
    if named:
        return Inputs((), named)
    # A single field is the input, whatever it is called.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and len(given) > 1:
        return Inputs((), given)
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if len(tensors) == 1:
        return Inputs((tensors[0],), {})
    raise ExtractError(
        f"the batches have the fields {', '.join(map(repr, fields))}, and the model's forward takes "
        f"{', '.join(map(repr, parameters))}. Say with input_fn=lambda batch: ... what to call it with."
    )


def labels_of(batch: Any) -> Any:
    """The labels of a batch that has an obvious place for them: the second of two, or a field of that name.

    A mask does not count: after token ids and their mask, they are the third.
    """
    if mask_beside(batch) is not None:
        batch = [batch[0], *batch[2:]]
    fields = fields_of(batch)
    if fields is not None:
        found = next((fields[key] for key in _LABELS if key in fields), None)
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if isinstance(found, Tensor):
        # The second of two may also be a second input, or a target as large as the image.
        return found if found.dim() == 1 and len(found) == rows_in(batch) else None
    texts = isinstance(found, (list, tuple)) and len(found) > 0 and all(isinstance(text, str) for text in found)
    return list(found) if texts and found is not None else None


def unused_parts(batch: Any, *named: Any) -> list[int]:
    """The tensors of a batch that reach neither the model nor the store, beyond an input and its target.

    ``named`` are what the user has said of ids, labels and lengths: places in the batch, or functions of it.

    >>> unused_parts([torch.ones(2, 3), torch.ones(2), torch.ones(2)])
    [1, 2]
    >>> unused_parts([torch.ones(2, 3), torch.ones(2), torch.ones(2)], 1, lambda batch: batch[2])
    []
    """
    if fields_of(batch) is not None or not isinstance(batch, (tuple, list)) or len(batch) < 3:
        return []
    if any(callable(part) for part in named):  # who knows what it reads
        return []
    used = {0, *(part for part in named if type(part) is int)}
    if mask_beside(batch) is not None:
        used |= {1} if labels_of(batch) is None else {1, 2}
    return [place for place, part in enumerate(batch) if place not in used and isinstance(part, Tensor)]


def part_of(batch: Any, part: str | int | Callable[[Any], Any], keyword: str) -> Any:
    """The part of a batch that ``ids=``, ``labels=`` or ``lengths=`` names."""
    if callable(part):
        return part(batch)
    fields = fields_of(batch)
    if isinstance(part, str):
        if fields is None or part not in fields:
            raise ExtractError(
                f"{keyword}={part!r}: the batches have no such field. {suggestion(part, fields or {})}".rstrip()
            )
        return fields[part]
    try:
        return batch[part]
    except (LookupError, TypeError) as error:
        raise ExtractError(
            f"{keyword}={part!r}: a number is the place of a field in each batch, and a batch is "
            f"{tree.describe(batch)}. Give the name of a field, one value for every row, or a function of a batch."
        ) from error


def move(value: Any, device: torch.device) -> Any:
    """The tensors of a value on ``device``; from pinned memory without waiting."""

    def moved(tensor: Tensor) -> Tensor:
        # Safe from memory that is not pinned, too: CUDA has taken it over when the call returns.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")

    # Nearly always, and in every batch: there is nothing to be taken apart.
    if isinstance(value, Inputs) and not value.kwargs and all(isinstance(part, Tensor) for part in value.args):
        return Inputs(tuple(map(moved, value.args)), {})
    return tree.map_tensors(moved, value)
