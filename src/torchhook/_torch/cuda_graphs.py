"""Inductor with CUDA graphs, whose memory the next call writes over: results are copied out of it, once."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchhook._torch.finding import find

Strides = tuple[int, ...]

_KEEPS = "keep_output_stride"
_COMPILED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# It takes a mode and options together.
_inductor: Any = find("_TorchCompileInductorWrapper", None)


def are_asked_for(how: Mapping[str, Any]) -> bool:
    """Whether these arguments of ``torch.compile`` ask for CUDA graphs."""
    options = how.get("options") or {}
    return how.get("mode") in ("reduce-overhead", "max-autotune") or bool(options.get("triton.cudagraphs"))


def copied_out(value: Tensor) -> Tensor:
    """A copy of a result that the next call would write over, and any other as it is."""
    return value.clone() if _is_written_over(value) else value


def _is_written_over(value: Tensor) -> bool:
    return value.is_cuda


def copying_out(how: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of ``torch.compile`` that do what these do, and copy the results out; ``None`` where there are none."""
    mode, options = how.get("mode"), how.get("options")
    # What is between two graphs goes through eager code, which may count on the strides.
    if not how.get("fullgraph") or how.get("backend", "inductor") != "inductor":
        return None
    if mode is not None and options is not None:  # which torch.compile refuses
        return None
    if _inductor is None or any(name.replace("-", "_") == _KEEPS for name in options or ()):
        return None
    try:
        backend = _CopyingOut(mode, options, how.get("dynamic"))
    except RuntimeError:  # an option that inductor does not have: torch.compile knows it, or refuses it
        return None
    rest = {name: value for name, value in how.items() if name not in ("mode", "options")}
    return {**rest, "backend": backend}


class _CopyingOut:
    """A backend: inductor in layouts of its own, and copies of the results in those of eager code."""

    # Results lie in the graph's memory in whatever layout inductor likes: brought into eager's in there, they would be
    # copied twice.

    def __init__(self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None) -> None:
        self._as_asked = _inductor(mode, options, dynamic)
        self._in_any_layout = _inductor(mode, {**(options or {}), _KEEPS: False}, dynamic)

    def __eq__(self, other: object) -> bool:
        # Code that was compiled for one is used for others that are equal.
        return isinstance(other, _CopyingOut) and bool(self._as_asked == other._as_asked)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        results = _results(graph)
        strides = [_strides_of_a_clone(result) for result in results]
        tensors = [result for result in results if isinstance(result, Tensor)]
        is_free = (
            any(_is_written_over(tensor) for tensor in tensors)
            and all(known is not None or result is None for known, result in zip(strides, results, strict=True))
            # Views that autograd has to know are made of such a result anew, by the strides that it has in eager code.
            and not any(tensor.requires_grad for tensor in tensors)
        )
        inductor = self._in_any_layout if is_free else self._as_asked
        return _copied(inductor(graph, inputs), strides)

    def reset(self) -> None:
        """Forget the graphs, as ``torch._dynamo.reset`` wants it."""
        self._as_asked.reset()


def _results(graph: torch.fx.GraphModule) -> list[Any]:
    """What a graph returns, as the compiler has seen it: tensors without values."""
    (nodes,) = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args
    return [getattr(node, "meta", {}).get("example_value") for node in nodes]


def _strides_of_a_clone(result: Any) -> Strides | None:
    """Those that a clone has in eager code: a dense tensor's own. ``None`` where they are not known beforehand."""
    if not isinstance(result, Tensor) or result.layout != torch.strided or hasattr(result, "__tensor_flatten__"):
        return None  # the last are made of other tensors, each with strides of its own
    sizes, strides = tuple(result.shape), result.stride()
    if not all(type(number) is int for number in (*sizes, *strides)):  # dynamic shapes
        return None
    return torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()


def _copied(compiled: Callable[..., Any], strides: list[Strides | None]) -> Callable[..., list[Any]]:
    quickly = _compiled_copies()

    def run(*args: Any) -> list[Any]:
        values, others = list(compiled(*args)), []
        for place, (value, wanted) in enumerate(zip(values, strides, strict=True)):
            if not isinstance(value, Tensor):
                continue
            if wanted is None or value.stride() == wanted:
                values[place] = copied_out(value)
            elif _is_written_over(value) and not value.requires_grad and value.dtype in _COMPILED:
                others.append(place)
            else:
                values[place] = _restrided([value], [wanted])[0]
        if others:
            others.reverse()  # the newest first: the device may still have it in its cache
            # Compiled: its kernels go through two layouts in tiles, which eager copies do not.
            new = quickly([values[place] for place in others], [strides[place] for place in others])
            for place, value in zip(others, new, strict=True):
                values[place] = value
        return values

    return run


def _restrided(values: Sequence[Tensor], strides: Sequence[Strides]) -> list[Tensor]:
    """Copies with other strides; gradients flow through them."""
    return [
        torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device).copy_(value)
        for value, wanted in zip(values, strides, strict=True)
    ]


def _compiled_copies() -> Callable[..., list[Tensor]]:
    # The compiler counts how often it compiles a code, and gives up on it after a few times: each graph has its own.
    own = types.FunctionType(_restrided.__code__.replace(), _restrided.__globals__, "restrided")
    return torch.compile(own, dynamic=False, options={"triton.cudagraphs": False, _KEEPS: True})
