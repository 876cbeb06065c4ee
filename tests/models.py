"""Small models that try to make a capture lie, each with its inputs; and the oracle that says what is true.

``CASES`` holds them by name; before them come a few that several test files use. The oracle is bare PyTorch:
``watch`` puts a cloning hook on every module, ``frozen`` turns a value into plain data at the moment it is seen, which
``==`` compares bit by bit. Nothing in this file knows the library.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

# -- the oracle -------------------------------------------------------------------------------


class Opaque(NamedTuple):
    """A leaf that cannot be compared: its type is all there is to say."""

    kind: str


def frozen(value: Any, above: tuple[int, ...] = ()) -> Any:
    """``value`` as plain data that nobody else can write to: tensors are cloned, containers become tuples."""
    if isinstance(value, Tensor):
        return _frozen_tensor(value)
    if isinstance(value, np.ndarray):
        return ("ndarray", value.dtype.str, value.shape, value.tobytes())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.Size, torch.dtype)):
        return (type(value).__name__, repr(value))
    if id(value) in above:
        return Opaque("itself")
    kind, above = type(value).__name__, (*above, id(value))
    if isinstance(value, Mapping):
        held = vars(value) if hasattr(value, "__dict__") else {}
        return (kind, tuple((repr(k), frozen(v, above)) for k, v in value.items()), _attributes(held, above))
    if isinstance(value, (tuple, list, deque)):
        held = vars(value) if hasattr(value, "__dict__") else {}
        return (kind, tuple(frozen(v, above) for v in value), _attributes(held, above))
    if isinstance(value, (set, frozenset)):
        return (kind, tuple(sorted((frozen(v, above) for v in value), key=repr)))
    if isinstance(value, (nn.Module, types.GeneratorType, type, types.FunctionType, types.MethodType)):
        return Opaque(kind)
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return (kind, _attributes(held, above)) if held else Opaque(kind)


def _attributes(held: Mapping[str, Any], above: tuple[int, ...]) -> Any:
    return tuple((name, frozen(v, above)) for name, v in held.items() if not name.startswith("__"))


def _frozen_tensor(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # a transform's own view of a tensor ends with it
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():
        return _as_bytes(tensor.detach() if tensor.requires_grad else tensor)


def _as_bytes(tensor: Tensor) -> Any:
    about = (type(tensor).__name__.replace("Parameter", "Tensor"), str(tensor.dtype), str(tensor.layout))
    about += (str(tensor.device),)
    if tensor.is_nested:
        return (*about, tuple(_as_bytes(part) for part in tensor.unbind()))
    about += (tuple(tensor.shape),)
    if tensor.is_quantized:
        return (*about, str(tensor.qscheme()), tensor.int_repr().numpy().tobytes())
    if tensor.layout == torch.sparse_coo:
        parts: tuple[Tensor, ...] = (tensor._indices(), tensor._values())
        return (*about, tensor.is_coalesced(), tuple(_as_bytes(part) for part in parts))
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return (*about, tuple(_as_bytes(part) for part in parts))
    if tensor.layout != torch.strided:
        return (*about, _as_bytes(tensor.to_dense()))
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return about
    if type(tensor) is not Tensor:
        tensor = tensor.held if isinstance(tensor, Wrapper) else tensor.as_subclass(Tensor)
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return (*about, dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")


def tensors_in(value: Any, above: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Every tensor inside ``value``, found without the library."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (nn.Module, types.GeneratorType, type)) or id(value) in above:
        return
    else:
        inside: list[Any] = []
        if isinstance(value, Mapping):
            inside += value.values()
        elif isinstance(value, (tuple, list, deque, set, frozenset)):
            inside += value
        inside += getattr(value, "__dict__", {}).values()
        slots = (name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
        inside += (getattr(value, name) for name in slots if hasattr(value, name))
        for part in inside:
            yield from tensors_in(part, (*above, id(value)))


Seen = dict[str, list[Any]]


@contextlib.contextmanager
def watch(names: Mapping[str, nn.Module]) -> Iterator[tuple[Seen, Seen]]:
    """What bare hooks see of each module: its outputs and its inputs, call by call, cloned on the spot.

    A call inside a backward pass recomputes one that was seen before.
    """
    outputs: Seen = {name: [] for name in names}
    inputs: Seen = {name: [] for name in names}

    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                outputs[name].append(frozen(output))

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():
                inputs[name].append(frozen(args[0] if len(args) == 1 and not kwargs else (args, kwargs)))

        return hook

    handles = []
    for name, module in names.items():
        handles.append(module.register_forward_hook(after(name)))
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
    try:
        yield outputs, inputs
    finally:
        for handle in handles:
            handle.remove()


# -- the registry -----------------------------------------------------------------------------

GRAD, NO_GRAD, INFERENCE = "enable_grad", "no_grad", "inference_mode"
MODES = {GRAD: torch.enable_grad, NO_GRAD: torch.no_grad, INFERENCE: torch.inference_mode}
ALL = (GRAD, NO_GRAD, INFERENCE)
WITHOUT_GRAD = (NO_GRAD, INFERENCE)


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _names(model: nn.Module) -> dict[str, nn.Module]:
    without_forward = (nn.ModuleList, nn.ModuleDict)
    return {name: m for name, m in model.named_modules() if type(m) not in without_forward}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] = _call
    modes: tuple[str, ...] = ALL
    names: Callable[[nn.Module], dict[str, nn.Module]] = _names
    """The modules of the model by the names that a user would give them."""
    original: Callable[[], nn.Module] | None = None
    """The model for the bare hooks, where hooks cannot see into the other one."""
    backward: bool = True
    """Whether the output's sum can be differentiated under ``enable_grad``."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1)
        given = self.inputs()
        if isinstance(given, tuple):
            return given, {}
        return ((), given) if isinstance(given, dict) else ((given,), {})


CASES: dict[str, Case] = {}


def _x() -> Tensor:
    return torch.randn(2, 4)


def case(inputs: Callable[[], Any] = _x, **options: Any) -> Callable[[Any], Any]:
    """Register a module class, or a function that builds a module, under its name."""

    def register(build: Any) -> Any:
        assert build.__name__ not in CASES
        CASES[build.__name__] = Case(build.__name__, build, inputs, **options)
        return build

    return register


class Apply(nn.Module):
    """Runs a function: the smallest module with an operation of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Nasty(nn.Module):
    """Every value is overwritten by the next line."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = self.relu(layer(x))
            y += x
            x = y.mul_(0.5)
        return x


class Toy(nn.Module):
    """Two linear layers for the toys below to play with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


# -- values that are overwritten after they were seen -----------------------------------------


@case()
def InplaceActivations() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4, 4), nn.Hardtanh(inplace=True), nn.ELU(inplace=True))


@case()
def InplaceOnTheInputItself() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Identity(), nn.Threshold(0.5, 2.0, inplace=True))


@case()
class Residual(Toy):
    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        out += x
        out = self.b(out)
        out += x
        return out


@case()
class WriteToASlice(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :2].mul_(2)
        y[..., 3] = 0
        return self.b(y)


@case()
class WriteToATranspose(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.t().add_(1)
        return self.b(y)


@case()
class WriteToAViewMadeBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        flat = y.view(-1)
        self.same(y)
        flat.add_(1)
        return y * 2


class _Split(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.chunk(2, dim=1)


@case(modes=WITHOUT_GRAD)
class WriteToSiblingViews(nn.Module):
    """Autograd forbids writing to one of several views of a function, so this one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.split = nn.Linear(4, 4), _Split()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        left, right = self.split(y)
        left += right
        right.zero_()
        return y


@case(modes=WITHOUT_GRAD)
class OutArgument(Toy):
    """``out=`` has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch.add(y, 1, out=y)
        torch.matmul(x, self.b.weight, out=y)
        return y


@case()
class WriteToData(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.data.mul_(3)
        y.detach().add_(1)
        return self.b(y)


@case()
class AssignData(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.data = torch.ones_like(y)
        return y + 0


@case()
class CopyInto(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.copy_(x)
        return y + self.b(x)


@case()
class IndexPut(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[torch.tensor([0, 1]), torch.tensor([1, 2])] = 7.0
        y.index_add_(0, torch.tensor([0]), torch.ones(1, 4))
        y.scatter_(1, torch.tensor([[0], [3]]), -5.0)
        return self.b(y)


@case()
class MaskedFill(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.masked_fill_(x > 0, float("-inf"))
        return self.b(y).nan_to_num_()


@case()
class MetadataInplace(Toy):
    """The shape changes in place, not the numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.t_().unsqueeze_(0)
        return y


@case(modes=WITHOUT_GRAD)
class ManyAtOnce(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), self.b(x)
        torch._foreach_add_([y, z], 1.0)
        return y + z


@case(modes=WITHOUT_GRAD)
class WriteThroughNumpy(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.numpy()[:] = 3.0
        np.asarray(y)[0] = 4.0
        torch.from_dlpack(y)[1, 1] = 5.0
        return y


@case(modes=WITHOUT_GRAD)
class WriteThroughStorage(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), self.b(x)
        y.untyped_storage().fill_(0)
        ctypes.memset(z.data_ptr(), 0, z.nbytes)
        torch.empty(0).set_(y.untyped_storage(), 0, (8,)).fill_(2.0)
        return y + z


@case(modes=WITHOUT_GRAD)
class PutAnotherStorage(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), self.b(x)
        y.set_(torch.ones(2, 4))
        z.untyped_storage().resize_(0)
        return y + 0


@case(modes=WITHOUT_GRAD)
class GrowTheStorage(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.resize_(4, 4).fill_(1.0)
        return y


@case(modes=WITHOUT_GRAD)
class FreeAndRefillTheStorage(Toy):
    """What activation recomputing without autograd's help does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        again = y.clone()
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(again.nbytes)
        y.copy_(again)
        return y * 2


@case(lambda: torch.randn(2, 3, 4, 4))
def InplaceDropout() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5, inplace=True), nn.Conv2d(3, 3, 1), nn.Dropout2d(0.5))


@case(lambda: torch.randn(3, 2, 4, 4))
def BatchNormTraining() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.BatchNorm2d(2, momentum=None))


@case(modes=WITHOUT_GRAD)
class StaticOutput(nn.Module):
    """A buffer that is the output of every call, as in code for CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.cell = _Cell()

    def forward(self, x: Tensor) -> Tensor:
        first = self.cell(self.a(x)) + 0
        return first + self.cell(x)


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("static", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.static.copy_(x)


class _Twin(nn.Module):
    """A module that returns its own memory, and a numpy array that must go on seeing it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.twin = cell.static.numpy()

    def forward(self, x: Tensor) -> Tensor:
        self.cell(x)
        self.cell(x + 1)
        return torch.from_numpy(self.twin.copy())


@case(modes=WITHOUT_GRAD)
def NumpyTwin() -> nn.Module:
    return _Twin(_Cell())


@case(modes=WITHOUT_GRAD)
class NumpyViewMadeBefore(nn.Module):
    """Numpy's pointer is older than the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * 2
        array = y.numpy()
        self.same(y)
        array[:] = 0
        return y


class _Detached(_Cell):
    """What leaves the module is the buffer under other tensor objects that are no views."""

    def forward(self, x: Tensor) -> Any:
        static = super().forward(x)
        return static.detach(), static.data


@case(modes=WITHOUT_GRAD)
def NumpyTwinOfDetached() -> nn.Module:
    return _Twin(_Detached())


class _PlainCell(nn.Module):
    """With a plain attribute, which the model does not list among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.static = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.static.copy_(x)


@case(modes=WITHOUT_GRAD)
def NumpyTwinOfAnAttribute() -> nn.Module:
    return _Twin(_PlainCell())


@case(lambda: torch.from_numpy(np.ones((2, 4), dtype=np.float32)))
class NumpyInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.b = nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(x)
        y.numpy()[:] = 2.0
        return self.b(y)


# -- what the model owns ----------------------------------------------------------------------


@case()
class BufferChangedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.last = self.a(x).detach()
        return self.a(x) * self.seen


class _Own(nn.Module):
    def __init__(self, what: Callable[[_Own], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.randn(4))
        self.what = what

    def forward(self) -> Any:
        return self.what(self)


@case()
class ReturnsItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = _Own(lambda m: m.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own()


@case()
class ReturnsItsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = _Own(lambda m: m.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.own()
        with torch.no_grad():
            self.own.scale.add_(1)
        return y + self.own()


@case()
class ReturnsViewsOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = _Own(lambda m: (m.weight.t(), m.weight[0], m.scale.view(2, 2), m.weight.detach(), m.scale.data))

    def forward(self, x: Tensor) -> Tensor:
        weight, row, *_ = self.own()
        return x @ weight + row


@case()
def ReturnsItsInput() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True))


@case()
class TiedWeights(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@case()
class UpdatesItsWeights(Toy):
    """Test-time training: the weights change between two calls of one layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight * 2)
        return self.b(y)


# -- how modules are called -------------------------------------------------------------------


@case()
class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(self.act(self.first(self.act(x * 2)))))


@case()
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.ReLU(), self.one)
        self.two = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.inner(self.one(x)))


@case()
class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.step(x)
            x *= 1.5
        return x


@case(lambda: (torch.randn(2, 4), 4))
class Recursion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        y = self.a(x)
        return y if depth == 0 else self(y, depth - 1).add_(1)


@case()
class ContainsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.me = self
        self.deep = 0

    def forward(self, x: Tensor) -> Tensor:
        self.deep += 1
        y = self.a(x)
        y = self.me(y) if self.deep < 3 else y
        self.deep -= 1
        return y


@case()
class HoldsItsParent(nn.Module):
    """A child that knows its parent, as some code bases do."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.child.parent = self

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@case(lambda: torch.tensor([[3.0, 0, 0, 0]]))
class CalledAsOftenAsTheDataSays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0])):
            x = self.some(x)
        return self.none(x) if x.isnan().any() else x


@case(lambda: {"x": torch.randn(2, 4), "scale": 2.0})
class KeywordsOnly(Toy):
    def forward(self, *, x: Tensor, scale: float) -> Tensor:
        return self.b(input=self.a(input=x)) * scale


@case(tuple)
class NoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = _Own(lambda m: m.weight * 2)

    def forward(self) -> Tensor:
        return self.own()


class _Many(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        total = args[0] + sum(a for a in args[1:] if isinstance(a, Tensor))
        args[0].mul_(2)
        return total if kwargs.get("total", True) else args


@case(lambda: (torch.randn(2, 4), torch.randn(2, 4), None, "text"))
class ManyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = _Many()

    def forward(self, *args: Any) -> Any:
        return self.many(*args), self.many(*args, total=False)[0], self.many(args[0])


@case()
class UsesWeightsDirectly(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a.forward(x), self.b.weight, self.b.bias)


@case()
class UsesAGrandchildDirectly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.block[1](self.block[0](x))


@case()
class SwapsAChild(nn.Module):
    """The module that was hooked is no longer there when the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.a = nn.Linear(4, 4)
        self.extra = nn.ReLU()
        return self.extra(self.a(y))


@case()
class RaisesAndCatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.picky = nn.Linear(4, 4), _Picky()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        for error in (ValueError, KeyboardInterrupt, None):
            try:
                y = self.picky(y, error)
            except Exception:
                y = y + 1
            except:  # noqa: E722
                y = y + 2
        return y


class _Picky(nn.Module):
    def forward(self, x: Tensor, error: Any) -> Tensor:
        if error is not None:
            raise error("not this one")
        return x * 2


def _doubling_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _shifting_hook(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


@case()
class UsersOwnHooks(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(_doubling_hook)
        self.a.register_forward_pre_hook(_shifting_hook)
        self.b.register_forward_hook(lambda m, a, k, o: o.add_(len(k)), with_kwargs=True, always_call=True)
        self.b.register_full_backward_hook(lambda m, gi, go: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=self.a(x))


# -- names ------------------------------------------------------------------------------------


@case()
class NestedContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pair = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace=True)])
        self.tree = nn.ModuleDict(
            {"left": nn.ModuleList([pair]), "right": nn.Sequential(nn.Sequential(nn.Linear(4, 4)))}
        )
        self.nothing = None
        self.register_module("none", None)

    def forward(self, x: Tensor) -> Tensor:
        linear, relu = self.tree["left"][0]
        return self.tree["right"](relu(linear(x)))


@case()
class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ["a/b", "a#1", "a:input", "*", "**", "a", "a*", "[a]", "?", " ", "é", "a/b#2:grad", "0", "module"]
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@case()
class HasAModuleAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4))
        self._orig_mod = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(self.module(x))


class _Guarded(nn.Module):
    """Attributes that are computed, and one that refuses to be read."""

    _held = ("linear",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def secret(self) -> Any:
        raise RuntimeError("do not read this")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" in self.__dict__ and name not in self._held:
            raise AttributeError(f"{name} is not allowed here")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@case()
def GuardedAttributes() -> nn.Module:
    return nn.Sequential(_Guarded(), nn.ReLU(inplace=True))


class _Falsy(nn.Module):
    """Compares and hashes by its content, and is false."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Falsy)

    def __hash__(self) -> int:
        return 7

    def __bool__(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _names_by_identity(model: nn.Module) -> dict[str, nn.Module]:
    return {
        "": model,
        **{f"{i}{tail}": m for i in "01" for tail, m in (("", model[int(i)]), (".linear", model[int(i)].linear))},
    }


@case(names=_names_by_identity)
def EqualModules() -> nn.Module:
    return nn.Sequential(_Falsy(), _Falsy())


# -- what modules return ----------------------------------------------------------------------


class _Wrap(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x)


class _Overwrites(nn.Module):
    """A child returns something made of a tensor, and the parent overwrites that tensor afterwards."""

    def __init__(self, wrap: Callable[[Tensor], Any], keep: bool = True) -> None:
        super().__init__()
        self.a, self.child, self.keep = nn.Linear(4, 4), _Wrap(wrap), keep

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        value = self.child(y)
        with torch.no_grad():
            y.detach().mul_(2)
        return value if self.keep else y


Pair = namedtuple("Pair", ["first", "second"])


class Typed(NamedTuple):
    value: Tensor
    extra: Any = None


@dataclasses.dataclass
class Data:
    value: Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    extra: tuple[Any, ...] = ()


@dataclasses.dataclass
class Output(OrderedDict):
    """As the model outputs of the transformers library: a dict, a dataclass and a tuple at once."""

    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class AttributeDict(dict):
    """Items and attributes are the same thing, by the usual trick."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class NotedList(list):
    note: Any = None


class Thing:
    def __init__(self, value: Any) -> None:
        self.value, self.label = value, "thing"


class Slotted:
    __slots__ = ("label", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.label = value, "slotted"


class HalfSlotted(Slotted):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.more = value


class Point(tuple):
    """A tuple that is not made from one iterable."""

    def __new__(cls, x: Any, y: Any) -> Point:
        return super().__new__(cls, (x, y))


class Immutable(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("cannot be changed")


class Uncopyable(Thing):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be copied")


class View(Mapping):
    """A mapping that is no dict."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Cyclic:
    def __init__(self, value: Tensor) -> None:
        self.value, self.me = value, self


def _default_dict(x: Tensor) -> Any:
    return defaultdict(list, {"a": [x, x * 2]})


def _noted_list(x: Tensor) -> Any:
    result = NotedList([x, x + 1])
    result.note = x
    return result


_OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "Tuple": lambda x: (x, x * 2),
    "EmptyTuple": lambda x: (),
    "OneTuple": lambda x: (x,),
    "List": lambda x: [x, [x * 2, None]],
    "Dict": lambda x: {"a": x, 1: x * 2, ("b", 2): None},
    "OrderedDict": lambda x: OrderedDict(a=x, b=x + 1),
    "DefaultDict": _default_dict,
    "Counter": lambda x: collections.Counter(a=2),
    "Deque": lambda x: deque([x, x + 1], maxlen=2),
    "NamedTuple": lambda x: Pair(x, Typed(x * 2)),
    "Dataclass": lambda x: Data(x, {"more": x}),
    "FrozenSlotsDataclass": lambda x: Frozen(x, (x, 1)),
    "ModelOutput": lambda x: Output(x, (x, x * 2)),
    "AttributeDict": lambda x: AttributeDict(a=x, b=[x]),
    "ListWithAttributes": _noted_list,
    "Object": lambda x: Thing([x, {"deep": Thing(x)}]),
    "SlottedObject": lambda x: Slotted(x),
    "HalfSlottedObject": lambda x: HalfSlotted([x]),
    "TupleWithItsOwnNew": lambda x: Point(x, x * 2),
    "ImmutableDict": lambda x: Immutable(a=x),
    "UncopyableObject": lambda x: Uncopyable(x),
    "MappingThatIsNoDict": lambda x: View({"a": x}),
    "MappingProxy": lambda x: types.MappingProxyType({"a": x}),
    "Namespace": lambda x: types.SimpleNamespace(a=x, b=1),
    "SetOfTensors": lambda x: {x},
    "CyclicObject": lambda x: Cyclic(x),
    "SharedTwice": lambda x: [x] * 3,
    "ReturnTypes": lambda x: torch.return_types.max((x, x.long())),
    "NoneOutput": lambda x: None,
    "Numbers": lambda x: (1, 2.5, True, "text", 3j, b"x", torch.float16, torch.Size([2])),
    "NumpyArray": lambda x: (x.detach().numpy(), np.float32(2)),
    "Mixture": lambda x: {"a": (x, [Data(x, Pair(None, {"b": x}))]), "c": Frozen(x, (Thing(x), "s"))},
    "ClassAndFunction": lambda x: (Thing, _default_dict, x),
    "ModuleInside": lambda x: {"module": nn.Identity(), "x": x},
    "Views": lambda x: (x[0], x[:, 1], x.t(), x.view(-1), x.expand(3, 2, 4), x[..., :0]),
    "NegativeView": lambda x: torch.view_as_complex(x.view(2, 2, 2)).conj().imag,
    "ConjugateView": lambda x: torch.view_as_complex(x.view(2, 2, 2)).conj(),
}


def _add_outputs() -> None:
    for name, wrap in _OUTPUTS.items():

        def build(wrap: Callable[[Tensor], Any] = wrap) -> nn.Module:
            return _Overwrites(wrap)

        build.__name__ = f"Output{name}"
        case()(build)


_add_outputs()


@case()
class GeneratorOutput(nn.Module):
    """Reading it would leave nothing for the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.child = nn.Linear(4, 4), _Wrap(lambda x: (row * 2 for row in x))
        self.mapped = _Wrap(lambda x: map(torch.abs, x))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return torch.stack(list(self.child(y))) + torch.stack(list(self.mapped(y)))


@case()
class ListThatGrows(nn.Module):
    """The container, not the tensor, is changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.listed, self.named = _Wrap(lambda x: [x]), _Wrap(lambda x: {"x": x})

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        rows, named = self.listed(y), self.named(y)
        rows.append(y + 1)
        named["x"] = None
        return rows[0] + rows[1]


# -- kinds of tensors -------------------------------------------------------------------------


def _overwriting(wrap: Callable[[Tensor], Any], then: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.same = _Wrap(wrap), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            y = self.same(self.child(x))
            with torch.no_grad():
                return then(y)

    return Overwriting


_KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "Half": (lambda x: x.half(), lambda y: y.mul_(2)),
    "BFloat16": (lambda x: x.bfloat16(), lambda y: y.mul_(2)),
    "Double": (lambda x: x.double(), lambda y: y.mul_(2)),
    "Float8": (lambda x: x.to(torch.float8_e4m3fn), lambda y: y.zero_()),
    "Complex": (lambda x: torch.complex(x, -x), lambda y: y.mul_(2j)),
    "Bool": (lambda x: x > 0, lambda y: y.logical_not_()),
    "Integers": (lambda x: (x * 10).long(), lambda y: y.add_(1)),
    "Bytes": (lambda x: (x * 10).to(torch.uint8), lambda y: y.add_(1)),
    "NoDimensions": (lambda x: x.sum(), lambda y: y.mul_(2)),
    "Empty": (lambda x: x[:0].clone(), lambda y: y.mul_(2)),
    "Expanded": (lambda x: x[:1].clone().expand(3, 4), lambda y: y + 1),
    "NotANumber": (lambda x: x / 0 * 0, lambda y: y.nan_to_num_()),
    "Strided": (lambda x: torch.randn(4, 6).as_strided((2, 2), (6, 3)), lambda y: y.mul_(2)),
    "Parameter": (lambda x: nn.Parameter(x.detach().clone()), lambda y: y.mul_(2)),
    "SparseCoo": (lambda x: x.relu().to_sparse(), lambda y: y.mul_(2)),
    "SparseUncoalesced": (
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), x.reshape(-1)[:2], (2, 4)),
        lambda y: y.coalesce(),
    ),
    "Mkldnn": (lambda x: x.to_mkldnn(), lambda y: torch.ops.aten.relu_(y)),
    "Quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8), lambda y: y.copy_(torch.zeros(2, 4))),
    "QuantizedPerChannel": (
        lambda x: torch.quantize_per_channel(x, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
        lambda y: y.clone(),
    ),
}


def _add_kinds() -> None:
    for name, (wrap, then) in _KINDS.items():
        build = _overwriting(wrap, then)
        build.__name__ = f"Tensor{name}"
        case(backward=False)(build)


_add_kinds()


@case(modes=(GRAD, NO_GRAD), backward=False)
def TensorSparseCsr() -> nn.Module:
    """PyTorch cannot make these in inference mode."""
    return _overwriting(lambda x: x.relu().to_sparse_csr(), lambda y: y.values().mul_(2).sum())()


@case(lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
def ChannelsLast() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.AvgPool2d(2))
    return model.to(memory_format=torch.channels_last)


@case(lambda: torch.randn(2, 4).half())
def HalfModel() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).half()


@case(lambda: torch.randn(2, 4).bfloat16())
def BFloat16Model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.LayerNorm(4)).bfloat16()


@case(lambda: torch.randn(2, 4, dtype=torch.complex64), backward=False)
def ComplexModel() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), _Wrap(lambda x: x.mul_(1j)), _Wrap(torch.view_as_real))


@case(backward=False)
class DynamicQuantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        float_ = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()
        self.inner = torch.ao.quantization.quantize_dynamic(float_, {nn.Linear}, dtype=torch.qint8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)


@case(_jagged, backward=False)
def NestedJagged() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), _Wrap(lambda x: x.mul_(2)))


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])


@case(_nested, backward=False)
def NestedStrided() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), _Wrap(lambda x: x.mul_(2)), nn.ReLU())


@case(lambda: torch.randn(2, 4, device="meta"), backward=False)
def MetaTensors() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU(inplace=True))


def _run_fake(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.empty(2, 4))


@case(run=_run_fake, backward=False)
def FakeTensors() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


class Tagged(Tensor):
    """A subclass that only changes the type."""


@case(lambda: torch.randn(2, 4).as_subclass(Tagged))
def PlainSubclass() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Softsign(), _Wrap(lambda x: x.mul_(2)))


class Wrapper(Tensor):
    """A subclass that holds another tensor and has no memory of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.held if isinstance(value, Wrapper) else value

        tree_map = torch.utils._pytree.tree_map
        out = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if function.__name__.split(".")[0].endswith("_"):
            return args[0]
        return tree_map(lambda t: Wrapper(t) if isinstance(t, Tensor) else t, out)


@case(lambda: Wrapper(torch.randn(2, 4)), backward=False)
def WrapperSubclass() -> nn.Module:
    return nn.Sequential(_Wrap(lambda x: x + 1), _Wrap(lambda x: x.mul_(2)), nn.ReLU())


# -- PyTorch's own machinery ------------------------------------------------------------------


@case()
def WeightNorm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(inplace=True))


@case()
def SpectralNorm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU(inplace=True))


@case()
def OldSpectralNorm() -> nn.Module:
    """Works by a pre-hook that changes the weights in place."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU(inplace=True))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@case()
def Parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    return model


@case()
def LazyLayers() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU(inplace=True), nn.LazyLinear(2))


@case(lambda: torch.randn(2, 5, 8), backward=False)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x), self.attention(x, key=x, value=x, need_weights=False)


@case(lambda: torch.randn(2, 5, 8))
def EncoderTraining() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@case(lambda: torch.randn(2, 5, 8))
def EncoderFastPath() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def _padded() -> dict[str, Tensor]:
    return {"src": torch.randn(2, 5, 8), "src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])}


@case(_padded, backward=False)
def EncoderWithPadding() -> nn.Module:
    """Without gradients, the layers inside see nested tensors."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()


@case(lambda: torch.randn(3, 2, 4), backward=False)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.cell = nn.LSTM(4, 3, 2), nn.GRU(3, 3, bidirectional=True), nn.LSTMCell(6, 2)

    def forward(self, x: Tensor) -> Any:
        y, (hidden, cell) = self.lstm(x)
        z, last = self.gru(y)
        state = None
        for step in z:
            state = self.cell(step, state)
        hidden.detach().mul_(2)
        return state, cell, last


@case(lambda: (torch.randn(3, 4, 4), torch.tensor([2, 4, 1])), backward=False)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=True)
        self.pack = _Wrap(lambda x: pack_padded_sequence(x, torch.tensor([2, 4, 1]), True, enforce_sorted=False))

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = self.pack(x)
        assert isinstance(packed, PackedSequence)
        out, last = self.rnn(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        out.data.detach().zero_()
        return padded, sizes, last


@case(lambda: (torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2])))
class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="sum")
        self.table = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets) + self.table(ids)[:2]


def _run_vmap(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.vmap(model)(*args)


@case(run=_run_vmap)
def Vmapped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), _Wrap(lambda x: x.mul_(2)), nn.Tanh())


def _run_functional(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = {name: value * 2 for name, value in model.named_parameters()}
    return torch.func.functional_call(model, weights, args)


@case(run=_run_functional)
def FunctionalCall() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))


def _run_jacobian(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.func.jacrev(model)(*args).detach(), torch.func.jvp(model, args, (torch.ones_like(args[0]),))


@case(run=_run_jacobian, modes=(GRAD, NO_GRAD), backward=False)
def FunctionTransforms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@case(modes=(GRAD,))
def CheckpointedNew() -> nn.Module:
    return _Checkpointed(reentrant=False)


@case(lambda: torch.randn(2, 4).requires_grad_(), modes=(GRAD,))
def CheckpointedReentrant() -> nn.Module:
    return _Checkpointed(reentrant=True)


def _names_wrapped(prefix: str) -> Callable[[nn.Module], dict[str, nn.Module]]:
    """Names as they were before wrapping; of a wrapper and what it wraps, the wrapped one."""

    def names(model: nn.Module) -> dict[str, nn.Module]:
        found = {}
        for name, module in _names(model).items():
            parts = [part for part in name.split(".") if part not in ("", prefix)]
            found[".".join(parts)] = module
        return found

    return names


@case(names=_names_wrapped("_checkpoint_wrapped_module"))
def CheckpointWrapped() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))))


@case(names=_names_wrapped("module"))
def DataParallelOnCpu() -> nn.Module:
    return nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))


@case()
def GraphModule() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)))


@case()
class Spectral(nn.Module):
    """Views of complex memory as real, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.fft, self.real = _Wrap(torch.fft.rfft), _Wrap(torch.view_as_real)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fft(x)
        self.real(y).detach().mul_(2)
        return y.abs()


@case()
class ChangesTheMode(Toy):
    """The gradient mode inside is not the one outside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
            y.mul_(2)
        with torch.enable_grad():
            return self.b(y)


@case()
class InferenceInside(Toy):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.a(x)
            y.mul_(2)
        return self.b(y.clone())


@case()
class Autocast(Toy):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            y.mul_(2)
            return self.b(y).float()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@case()
class CustomFunction(Toy):
    """An autograd function of the user's that writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Double.apply(self.a(x)))


@case()
class RandomInside(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += torch.randn_like(y)
        return F.dropout(self.b(y), 0.5, training=self.training)


@case()
class EvalInsideTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.frozen = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        self.drop.train(not self.drop.training)
        return self.frozen(self.drop(self.a(x)))


def _names_compiled(model: nn.Module) -> dict[str, nn.Module]:
    return _names_wrapped("_orig_mod")(model)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@case(original=_plain, names=_names_compiled)
def Compiled() -> nn.Module:
    model = torch.compile(_plain(), backend="eager")
    model(torch.zeros(2, 4))
    return model


@case(original=_plain, names=_names_compiled)
def CompiledPart() -> nn.Module:
    model = _plain()
    model[2] = torch.compile(model[2], backend="eager")
    model(torch.zeros(2, 4))
    return model


@case(original=_plain)
def CompiledInPlace() -> nn.Module:
    model = _plain()
    model.compile(backend="eager")
    model(torch.zeros(2, 4))
    return model


def scripted(module: nn.Module) -> Any:
    """TorchScript of a module; torch gives it up, and says so by a warning of another kind in each version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def _names_outside_script(model: nn.Module) -> dict[str, nn.Module]:
    """PyTorch refuses hooks on a scripted module, and those inside it would never fire."""
    return {name: module for name, module in _names(model).items() if name.partition(".")[0] != "1"}


@case(names=_names_outside_script)
def ScriptedPart() -> nn.Module:
    middle = scripted(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Identity(), nn.Hardtanh(0.1, 0.2, inplace=True))


class Merges(nn.Linear):
    """Like a LoRA layer: its own ``train`` merges weights for evaluation."""

    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            with torch.no_grad():
                self.weight += -1 if mode else 1
        return super().train(mode)


class Restless(nn.Module):
    """Changes whatever a forward pass can change: its input, statistics, caches, counters, modes, gradients, and
    every random number generator.
    """

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.calls, self.cache, self.keys = 0, [], torch.zeros(4)
        self.fails = fails
        self.head.weight.grad = torch.ones(2, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.keys += 1
        self.cache.append(x)
        self.register_buffer("latest", x.detach().mean())
        self.drop.train(not self.drop.training)
        with torch.enable_grad():
            self.head(x.detach()).sum().backward()
        x = self.norm(x.mul_(scale))
        x = self.drop(x) * random.random() + float(np.random.rand())
        x = self.attn(x, x, x)[0] + self.calls
        if self.fails:
            raise KeyError("mine")
        return self.head(x)


class PackedAttention(nn.Module):
    """Grouped queries as transformers 5.23 has them: those of one token are queries of the heads of keys."""

    num_heads, num_key_value_heads, head_dim = 4, 2, 8

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.packs = True

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """``x`` are the tokens, ``seen`` those that they attend to: a cache, and themselves."""
        q = self.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv_proj(seen).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        rows, tokens = x.shape[:2]
        if tokens == 1 and self.packs:
            q = q.reshape(rows, 2, 2, 8)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        attended = F.scaled_dot_product_attention(q, k, v)
        if tokens == 1:
            attended = attended.reshape(rows, 4, 1, 8)
        return self.o_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
