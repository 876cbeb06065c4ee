"""What an exported program returns: plain containers that load without torchhook, and their names for ONNX."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._values import tree
from torchhook.errors import require

# Where models put what they remember of earlier tokens, when it is no object of a class of its own.
_CACHES = frozenset({"past_key_values", "past_key_value", "cache_params", "mems", "encoder_past_key_values"})


def plain(value: Any, caches: bool = True) -> Any:
    """The same in tuples, lists and dicts, without classes that a fresh process would have to know.

    >>> plain(tree.Inputs((1,), {"mask": None}))
    {'args': (1,), 'kwargs': {'mask': None}}
    >>> plain({"logits": 1, "past_key_values": ((2, 3),)}, caches=False)
    {'logits': 1}
    """
    if isinstance(value, Tensor) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: plain(part, caches) for key, part in value.items() if caches or not _is_cache(key, part)}
    if hasattr(value, "_fields"):  # a named tuple
        parts = zip(value._fields, value, strict=True)
        return {key: plain(part, caches) for key, part in parts if caches or not _is_cache(key, part)}
    if isinstance(value, (list, tuple)):
        kept = [plain(part, caches) for part in value if caches or not _is_cache("", part)]
        return kept if isinstance(value, list) else tuple(kept)
    if dataclasses.is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {key: plain(part, caches) for key, part in named if caches or not _is_cache(key, part)}
    return value


def _is_cache(key: Any, value: Any) -> bool:
    return key in _CACHES or (not isinstance(value, Tensor) and type(value).__name__.endswith("Cache"))


def to_onnx(
    wrapper: nn.Module,
    own: inspect.Signature,
    paths: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str | os.PathLike[str] | None,
    dynamic_shapes: Any,
    options: dict[str, Any],
) -> Any:
    """Export a wrapper to ONNX, with the names of the sites on its outputs; ``own`` are the model's own arguments."""
    require("onnxscript", "onnx")
    shapes = _as_seen(dynamic_shapes, inspect.signature(wrapper.forward), own, args, kwargs)
    program = torch.export.export(wrapper, args, kwargs, dynamic_shapes=shapes, strict=False)
    with torch.no_grad():
        result = program.module()(*args, **kwargs)
    return torch.onnx.export(program, (), path, output_names=output_names(result, paths), dynamo=True, **options)


def _as_seen(
    shapes: Any, seen: inspect.Signature, own: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dynamic shapes of the model's own arguments, as ``torch.export`` has to be told them.

    >>> seen = inspect.signature(lambda *args, **kwargs: None)
    >>> _as_seen({"x": {0: "n"}, "mask": None}, seen, inspect.signature(lambda x, mask=None: 0), (1,), {"mask": 2})
    {'args': ({0: 'n'},), 'kwargs': {'mask': None}}
    """
    # Before torch 2.9 it sees the wrapper's own forward, which takes anything.
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if tuple(p.kind for p in seen.parameters.values()) != loose or not isinstance(shapes, (Mapping, tuple, list)):
        return shapes
    names = list(own.bind(*args, **kwargs).arguments)
    named = shapes if isinstance(shapes, Mapping) else dict(zip(names, shapes, strict=False))
    # What does not fit is left to torch, which says so; what the model itself takes in a heap has no name.
    if set(named) != set(names) or len(shapes) != len(names) or any(own.parameters[n].kind in loose for n in names):
        return shapes
    found = {"args": tuple(named[name] for name in names[: len(args)]), "kwargs": {key: named[key] for key in kwargs}}
    return {key: shape for key, shape in found.items() if shape}


def output_names(result: Any, paths: list[str]) -> list[str]:
    """The names of the tensors that an exported wrapper of ``paths`` returns, in order.

    >>> x = torch.ones(1)
    >>> output_names(({"fc": x, "lstm": (x, x)}, x), ["fc", "lstm"])
    ['fc', 'lstm.0', 'lstm.1', 'output']
    """
    features, output = result if isinstance(result, tuple) else (result, None)
    # Of a single layer, the value itself; only of several is there a dict by path.
    named = features if isinstance(features, dict) and features.keys() >= set(paths) else {paths[0]: features}
    names = _leaf_names(named)
    return names + _leaf_names({"model_output" if "output" in named else "output": output})


def _leaf_names(named: dict[str, Any]) -> list[str]:
    return [address for address, leaf in tree.leaves(named) if isinstance(leaf, Tensor)]
