"""What a call of a model that generates tells: its tokens, its cache, and the ``generate`` that calls it."""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from torchhook._core.generators import CACHES, TOKENS
from torchhook._torch import caller

_KEPT = ("logits_to_keep", "num_logits_to_keep")


class GenerateFrame(NamedTuple):
    """The frame of a ``generate`` that calls the model, and which part of it does."""

    frame: FrameType
    prefill: bool
    beams: bool


def generate_frame(module: nn.Module) -> GenerateFrame | None:
    """The ``generate`` that calls a module, if one does: the module's own, or the nearest."""
    # All frames of the stack, at each call of the model: no more is asked of them as long as none is of that name.
    frame = caller(1)
    while frame is not None:
        if frame.f_code.co_name == "generate":
            return _nearest(module, caller(1))
        frame = frame.f_back
    return None


def _nearest(module: nn.Module, above: FrameType | None) -> GenerateFrame | None:
    found, prefill, beams = None, False, False
    while above is not None:
        frame, above = above, above.f_back
        name = frame.f_code.co_name
        if name == "generate":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and (found is None or owner is module):
                # The outermost of its own: a model that drafts for itself calls it once more inside.
                found = GenerateFrame(frame, prefill, beams)
                prefill = False
        elif "prefill" in name:
            prefill = True
        elif "beam" in name:
            beams = True
    return found


class Given(NamedTuple):
    """What a call tells of the sequence."""

    rows: int | None
    tokens: int | None
    cache: Any
    position: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        # Loops, and no generators: this is asked at each call of the model.
        rows = width = cache = position = None
        for name in TOKENS:
            if name in kwargs and isinstance(one := kwargs[name], Tensor) and len(shape := one.shape) > 1:
                rows, width = shape[0], shape[1]
                break
        else:
            if args and isinstance(one := args[0], Tensor) and len(shape := one.shape) > 1:
                rows, width = shape[0], shape[1]
        for name in CACHES:
            if name in kwargs and (cache := kwargs[name]) is not None:
                break
        where = kwargs.get("cache_position")
        if isinstance(where, Tensor) and where.numel():
            # A copy of one number: the model may count on in the same memory, and a GPU is not waited for here.
            position = where.reshape(-1)[0].clone()
        elif cache is not None:
            position = length(cache)
        return cls(rows, width, cache, position)


def length(cache: Any) -> Any:
    """How many tokens a cache holds; ``None`` where it does not say, as those of state space models."""
    if cache is None:
        return None
    if isinstance(cache, (tuple, list)):  # of layers, each with its keys and values: batch × heads × tokens × channels
        layer = cache[0] if cache else None
        keys = layer[0] if isinstance(layer, (tuple, list)) and layer else None
        return keys.shape[-2] if isinstance(keys, Tensor) and keys.dim() == 4 else None
    try:
        found = cache.get_seq_length()
    except Exception:  # a stranger's cache, and the user's model goes on whatever it says
        return None
    if isinstance(found, Tensor):
        return found.reshape(-1)[0].clone() if found.numel() else None
    return found if isinstance(found, int) else None


def kept(kwargs: dict[str, Any]) -> int | None:
    """For how many tokens a call asks for logits, if it says so."""
    for name in _KEPT:
        if name in kwargs and type(kept := kwargs[name]) is int and kept > 0:
            return kept
    return None


def made_by(output: Any) -> Any:
    """The cache that a call returns, if it returns one."""
    for name in CACHES:
        if (made := getattr(output, name, None)) is not None:
            return made
    return None


def weak(cache: Any) -> ref[Any] | None:
    try:
        return None if cache is None else ref(cache)
    except TypeError:  # a tuple
        return None
