"""What is right, decided without the library: bare PyTorch hooks that clone, and snapshots of a model and the process.

Everything is compared in frozen form: ``freeze`` copies a nested value into plain nodes that nobody else can reach,
``differences`` lists where two of them are not the same to the bit.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
import random
import subprocess
import sys
import textwrap
import unittest
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Node(NamedTuple):
    """A container or object: the name of its type, and its parts by name or position."""

    kind: str
    parts: dict[str, Any]


class Copy(NamedTuple):
    """A tensor as it was."""

    tensor: Tensor
    on_graph: bool


PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout}


def freeze(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Copy a nested value by hand: tensors are cloned, containers and objects of any class become nodes."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return Copy(value.detach().clone(), value.requires_grad)
    if isinstance(value, np.ndarray):
        return Node("ndarray", {"": Copy(torch.from_numpy(value.copy()), False)})
    if isinstance(value, type) or callable(value):  # modules too: what is inside them is frozen under their own names
        return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
    if id(value) in above:
        return "<cycle>"
    above = (*above, id(value))
    return Node(type(value).__name__, {str(name): freeze(part, above) for name, part in _parts(value).items()})


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(sorted(value, key=str))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return getattr(value, "__dict__", None) or {str(value): None}


def copies(frozen: Any) -> Iterator[Copy]:
    """Every tensor of a frozen value."""
    if isinstance(frozen, Copy):
        yield frozen
    elif isinstance(frozen, Node):
        for part in frozen.parts.values():
            yield from copies(part)


def differences(expected: Any, found: Any, where: str = "", graph: bool = False) -> list[str]:
    """Where two frozen values differ; with ``graph``, also in which tensors require a gradient."""
    if isinstance(expected, Copy) and isinstance(found, Copy):
        return _tensor_differences(expected, found, where, graph)
    if isinstance(expected, Node) and isinstance(found, Node):
        if expected.kind != found.kind:
            return [f"{where}: a {expected.kind} was expected, found a {found.kind}"]
        if list(expected.parts) != list(found.parts):
            return [f"{where}: {expected.kind} of {list(expected.parts)} was expected, found {list(found.parts)}"]
        pairs = ((name, part, found.parts[name]) for name, part in expected.parts.items())
        return [line for name, one, two in pairs for line in differences(one, two, f"{where}.{name}", graph)]
    same_type = type(expected) is type(found)
    if same_type and (expected == found or (isinstance(expected, float) and expected != expected and found != found)):
        return []
    return [f"{where}: {_short(expected)} was expected, found {_short(found)}"]


def _tensor_differences(expected: Copy, found: Copy, where: str, graph: bool) -> list[str]:
    one, two = expected.tensor, found.tensor
    if type(one) is not type(two) or one.dtype != two.dtype or one.shape != two.shape or one.device != two.device:
        return [f"{where}: {_short(expected)} was expected, found {_short(found)}"]
    lines = []
    if not _same_bits(one, two):
        wrong = (one != two) & ~((one != one) & (two != two))
        gap = (one.double() - two.double()).abs().nan_to_num(0).max().item() if not one.is_complex() else "?"
        what = f"{int(wrong.sum())} of {one.numel()} elements are wrong, by up to {gap}"
        lines.append(f"{where}: {_short(found)}: {what if wrong.any() else 'only signs of zeros or NaNs differ'}")
    if graph and expected.on_graph != found.on_graph:
        lines.append(f"{where}: requires_grad={expected.on_graph} was expected, found {found.on_graph}")
    return lines


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if not one.numel():
        return True
    # A tensor of one element is contiguous whatever its strides say, and cannot be seen as bytes with some of them.
    plain = [t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for t in (one, two)]
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in plain))


def _short(frozen: Any) -> str:
    if isinstance(frozen, Copy):
        return f"{type(frozen.tensor).__name__} {tuple(frozen.tensor.shape)} {frozen.tensor.dtype}"
    return f"a {frozen.kind}" if isinstance(frozen, Node) else repr(frozen)[:80]


def assert_same(expected: Any, found: Any, what: str, graph: bool = False) -> None:
    """Fail with the first few places where two frozen values differ."""
    wrong = differences(expected, found, what, graph)
    shown = "\n  ".join(wrong[:12])
    assert not wrong, f"{len(wrong)} differences:\n  {shown}"


# -- what passed --------------------------------------------------------------------------------------------------


class BareHooks:
    """Two plain hooks on every module of a model: clone what goes in, clone what comes out."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.inputs: dict[str, list[Any]] = {}
        self.outputs: dict[str, list[Any]] = {}
        self.order: list[str] = []
        """Where outputs passed, in the order in which they did."""

    def __enter__(self) -> BareHooks:
        self._handles = [handle for name, module in self.modules.items() for handle in self._hook(name, module)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.inputs.setdefault(name, []).append(freeze((args, kwargs)))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            self.outputs.setdefault(name, []).append(freeze(output))
            self.order.append(name)

        return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def silent(model: nn.Module, ran: dict[str, list[Any]]) -> set[str]:
    """The modules that have a forward and did not run."""
    return {name for name, module in model.named_modules() if name not in ran and not isinstance(module, CONTAINERS)}


# -- what must be left as it was ----------------------------------------------------------------------------------


def snapshot(model: nn.Module, versions: bool = True) -> Node:
    """All that a model is made of and all of the process that a session could disturb.

    Without ``versions``, a tensor may have been written to in between, as running statistics are in training mode.
    """
    modules = {name: _module(module) for name, module in model.named_modules(remove_duplicate=False)}
    tensors = {name: _about(tensor, versions) for name, tensor in _tensors(model)}
    parts = {"modules": Node("", modules), "tensors": Node("", tensors), "process": process(), "random": _random()}
    return Node("snapshot", parts)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes."""
    for path, module in model.named_modules():
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value


def _module(module: nn.Module) -> Node:
    # The keys of hook dictionaries are numbers from a counter of the process.
    parts = {
        name: list(part.values()) if "_hooks" in name and isinstance(part, dict) else part
        for name, part in vars(module).items()
    }
    return Node(type(module).__qualname__, {name: freeze(part) for name, part in parts.items()})


def _about(tensor: Tensor, versions: bool) -> Node:
    parts = {
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "grad": None if not tensor.is_leaf else freeze(tensor.grad),
        "hooks": len(tensor._backward_hooks or ()),
        "version": None if not versions or tensor.is_inference() else tensor._version,
        "strides": str(tensor.stride()),
        "copy-on-write": torch._C._is_cow_tensor(tensor),
    }
    return Node("", parts)


def process() -> Node:
    """Grad mode, other modes, hooks on all modules: what a process shares, and no run of a model changes."""
    shared = vars(torch.nn.modules.module)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    parts = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "fused attention": torch.backends.mha.get_fastpath_enabled(),
        "stance": "default" if dynamo is None else dynamo._stance.stance,
        "hooks": [len(v) for k, v in sorted(shared.items()) if k.startswith("_global") and k.endswith("_hooks")],
        "context": sorted(variable.name for variable, value in contextvars.copy_context().items() if value),
    }
    return Node("", {name: freeze(part) for name, part in parts.items()})


def _random() -> Node:
    parts = {
        "torch": torch.get_rng_state(),
        "numpy": list(np.random.get_state()[1:3]),
        "python": hash(random.getstate()),
    }
    return Node("", {name: freeze(part) for name, part in parts.items()})


def identities(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The very objects and addresses of the parameters and buffers."""
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in _tensors(model)}


def hooks_on(model: nn.Module) -> list[Any]:
    """The forward hooks and pre-hooks of all modules."""
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def stance() -> str:
    """What the compiler is told to do with compiled code."""
    import torch._dynamo

    return torch._dynamo.eval_frame._stance.stance


# -- ways to run --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Collect every warning, those of torch's prototypes among them, instead of raising it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """What each function returns, or the error that it raises, run in threads at the same time."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(job) for job in work]]


def run_with_jax(code: str) -> None:
    """Run code in a process of its own: where JAX was imported, no data loader may fork any more."""
    if importlib.util.find_spec("jax") is None:
        raise unittest.SkipTest("JAX is not installed")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
