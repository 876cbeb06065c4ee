"""``guard``: stop at the first NaN or Inf and name the place that made it.

Everything that passes is checked in the order in which it is made, so the first bad value is the producer's and not a
propagator's: operations by a listener, what no listener sees (custom autograd functions, extensions) by the output of
its module, gradients by a hook on each node of the graph. The check is one sum: a finite sum has finite terms, and
only where it is not finite are the terms looked at, because the sum itself may overflow.

A NaN is reported at once. An Inf is reported when it leaves the module that made it, or turns into a NaN there: models
make infinities that they throw away again (the position buckets of T5, the logarithm of a mask of zeros and ones).

On the CPU the answer is there at once. On a GPU asking would make it wait, so the sums of a window of operations are
kept on the device and read together, at the latest before the outermost module returns or the backward pass ends: the
model may run a few operations past the first bad value, but its caller never gets it.
"""

from __future__ import annotations

import cmath
import contextlib
import dataclasses
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchhook import hooks, tree
from torchhook.errors import NeverRanWarning, TorchHookError
from torchhook.hooks import TensorHandles
from torchhook.keep import Keep
from torchhook.ops import Listener
from torchhook.recompute import graph_task
from torchhook.select import Index, Selector, Target, is_callable, resolve
from torchhook.session import Session
from torchhook.sites import Site

Action = Literal["raise", "warn", "record"]


class GuardError(TorchHookError, FloatingPointError):
    """A NaN or Inf was made; ``finding`` says where and from what."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> Any:
        return GuardError, (self.finding,)


class GuardWarning(UserWarning):
    """A NaN or Inf was made, and ``guard(action="warn")`` let the model go on."""


# -- what was found -----------------------------------------------------------------------------


class Statistics(NamedTuple):
    """One tensor in numbers. ``min`` to ``std`` are those of its finite values, ``None`` where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    neg_inf: int

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf or self.neg_inf)

    @property
    def bad(self) -> str:
        counts = [(self.nan, "NaN"), (self.inf, "+Inf"), (self.neg_inf, "-Inf")]
        return ", ".join(f"{n} {what}" for n, what in counts if n) or "all finite"

    def __str__(self) -> str:
        kind = f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"
        if self.min is None:
            return f"{kind}: {self.bad}"
        numbers = f"min {self.min:.4g}, max {self.max:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"
        return f"{kind}: {numbers}, {self.bad}"


@dataclasses.dataclass
class Finding:
    """Where the first NaN or Inf came from, and what it was made of."""

    kind: Literal["op", "module", "parameter", "buffer", "input", "loss", "outside"]
    site: Site
    """The producer: ``path/op#call``, ``path#call``, the name of a parameter or buffer; ``:input`` where an input
    already held it, ``:grad_input`` where a gradient went wrong on its way through, ``:grad`` where it came in so."""
    phase: Literal["forward", "backward"]
    run: int
    """Which run of the model since the guard was opened."""
    inputs: list[Statistics]
    weights: list[Statistics]
    outputs: list[Statistics]
    stack: list[str]
    """The modules around it, outermost first, as ``path (Type)``."""
    used_by: Site | None = None
    """The first to use a parameter, buffer or input that already held it."""
    node: str | None = None
    """Autograd's name for the step of the backward pass."""
    times: int = 1
    """How often this site was found at fault; the rest of the finding is about the first time."""

    def __str__(self) -> str:
        lines = [self._headline(), f"  in the {self.phase} pass of run {self.run}, inside {' > '.join(self.stack)}"]
        backward = self.phase == "backward"
        for what, some in (
            ("gradient in" if backward else "input", self.inputs),
            ("kept from the forward pass" if backward else "weight", self.weights),
            ("gradient out" if backward else "output", self.outputs),
        ):
            lines += [f"  {what}: {s}" for s in some]
        return "\n".join([*lines, f"  {self._advice()}"])

    def _headline(self) -> str:
        where, user = repr(str(self.site)), repr(str(self.used_by))
        whole = repr(self.site.path) if self.site.path else "the model"
        bad = next((s.bad for s in (*self.outputs, *self.weights, *self.inputs) if not s.finite), "NaN or Inf")
        if self.kind in ("parameter", "buffer"):
            held = next((s.bad for s in self.weights if not s.finite), bad)
            return f"{self.kind} {where} already holds {held}; {user} was the first to use it."
        if self.kind == "input":
            held = next((f"{s.name}: {s.bad}" for s in self.inputs if not s.finite), bad)
            return f"an input of {whole} already holds it ({held}): it was there before the model ran."
        if self.kind == "loss":
            return f"the gradient of the output of {whole} already holds {bad}: the loss, outside the model, made it."
        if self.kind == "outside":
            held = next((f"{s.name}: {s.bad}" for s in self.inputs if not s.finite), bad)
            return f"{where} was given it ({held}) by something that is no part of the model's run."
        if self.phase == "backward":
            return f"{where} made {bad} out of a finite gradient ({self.node})."
        masked = next((f"{s.name}: {s.bad}" for s in self.inputs if not s.finite), None)
        return f"{where} made {bad} out of {'finite inputs' if masked is None else f'masked inputs ({masked})'}."

    def _advice(self) -> str:
        if self.kind in ("parameter", "buffer"):
            return (
                "Look at what last wrote to it: a step with a bad gradient, a damaged checkpoint, a bad initialisation."
            )
        if self.kind == "input":
            return "Look at the data and what prepares it."
        if self.kind == "loss":
            return "Look at the loss: a log or division at 0, an overflow, a loss scale that is too large."
        if self.kind == "outside":
            return "Look at where that tensor was written: a plain attribute, a global, memory that was never filled."
        if self.phase == "backward":
            return (
                "Look at the derivative at these values: roots, norms and logs at 0, and branches that where() hides."
            )
        return f"To see the values: th.capture(model, {str(self.site.every_call)!r}, '{self.site.every_call}:input')."


# -- looking at tensors ---------------------------------------------------------------------------

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NARROW = tuple(d for name, d in vars(torch).items() if name.startswith("float8") and isinstance(d, torch.dtype))
_CANNOT = (RuntimeError, NotImplementedError, TypeError)  # fake tensors, layouts and subclasses without a sum
_in_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def _dense(tensor: Tensor) -> Tensor | None:
    """The tensor's elements as a plain tensor without a graph, or ``None`` if they cannot be Inf or cannot be read."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or _in_functorch():
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_nested:
        try:
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
        except _CANNOT:
            tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _flag(tensor: Tensor) -> bool | Tensor:
    """Whether the tensor may hold a NaN or Inf; off the CPU, its sum, which is still on the device."""
    try:
        dense = _dense(tensor)
        if dense is None:
            return False
        total = dense.sum(dtype=_WIDE.get(dense.dtype))
        return not cmath.isfinite(total.item()) if total.is_cpu else total
    except _CANNOT:
        return False


def _is_bad(tensor: Tensor) -> bool:
    flag = _flag(tensor)
    return flag if isinstance(flag, bool) else not cmath.isfinite(flag.item())


def _describe(name: str, tensor: Tensor) -> Statistics:
    dense = _dense(tensor)
    if dense is None or tensor.is_complex():
        dense = torch.empty(0) if dense is None else torch.view_as_real(dense)
    good = dense[dense.isfinite()].double() if dense.device.type != "mps" else dense[dense.isfinite()].float()
    low = high = mean = std = None
    if good.numel():
        low, high, mean, std = float(good.min()), float(good.max()), float(good.mean()), float(good.std(correction=0))
    shape = () if tensor.is_nested else tuple(tensor.shape)
    nan, inf, neg_inf = (int(f(dense).sum()) for f in (torch.isnan, torch.isposinf, torch.isneginf))
    return Statistics(name, shape, tensor.dtype, low, high, mean, std, nan, inf, neg_inf)


# -- the operations ---------------------------------------------------------------------------------

# These make no new values: they look at a shape, or show the same memory in another one.
_STILL = frozenset(
    {
        *("view", "view_as", "reshape", "reshape_as", "transpose", "t", "permute", "movedim", "swapaxes", "swapdims"),
        *("flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "broadcast_tensors"),
        *("getitem", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "unfold", "diagonal"),
        *("contiguous", "detach", "detach_", "requires_grad_", "size", "dim", "numel", "stride", "register_hook"),
    }
)
_STILL_NODES = re.compile(
    r"(?:View|Alias|ReshapeAlias|UnsafeView|Transpose|T|Permute|Select|Slice|Split|SplitWithSizes|Unsqueeze|Squeeze"
    r"|Unbind|Clone|AsStrided)Backward\d*"
)
# Their memory holds whatever was there before.
_BLANK = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "Tensor"})
_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_", "random_"})

_sequence: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
_WINDOW = 64
_WINDOW_BYTES = 1 << 28

Named = list[tuple[str, Tensor]]


class _Place(NamedTuple):
    """Where something passes."""

    path: str
    op: str | None
    call: int | None
    run: int
    around: tuple[nn.Module, ...]

    def site(self, port: str = "output") -> Site:
        return Site(self.path, self.op, self.call, port)


class _Origin(NamedTuple):
    """Whose memory an input is."""

    storage: int | None
    offset: int
    learned: bool


class _Passing(NamedTuple):
    """What goes into a place, what comes out, and what else is known."""

    place: _Place
    phase: Literal["forward", "backward"]
    inputs: Named
    outputs: Named
    storages: list[int | None]
    """Whose memory the outputs are. The outputs themselves may be copies, and the inputs too."""
    origins: list[_Origin] = []  # noqa: RUF012
    constants: list[float] = []  # noqa: RUF012
    saved: Named = []  # noqa: RUF012
    node: str | None = None


class _Crossing(NamedTuple):
    """What goes into a module or comes out of one."""

    values: Named | None
    """Not held on to while the device is still to be asked."""
    storages: list[int | None]
    left: nn.Module | None


class _Suspect(NamedTuple):
    """An Inf that has not left its module yet."""

    finding: Finding
    module: nn.Module
    alias: Tensor
    """Holds on to the memory, so that its address stays its own."""


def _named(value: Any, prefix: str) -> Named:
    if isinstance(value, Tensor):
        return [(prefix, value)]
    return [(f"{prefix}.{address}", leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Named, list[float]]:
    tensors: Named = []
    constants: list[float] = []
    for name, value in (*((str(i), a) for i, a in enumerate(args)), *kwargs.items()):
        for address, leaf in tree.leaves(value):
            if isinstance(leaf, Tensor):
                tensors.append((f"{name}.{address}" if address else name, leaf))
            elif isinstance(leaf, float):
                constants.append(leaf)
    return tensors, constants


def _overwritten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation is about to write to."""
    if "out" in kwargs:
        yield from tree.tensors(kwargs["out"])
    elif name == "setitem" or (name.endswith("_") and name not in _STILL):
        yield from (t for t in tree.tensors(list(args[:1])))
    elif name in ("batch_norm", "instance_norm"):
        running = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        yield from (t for t in running if isinstance(t, Tensor))


class _Watcher(Listener):
    """Checks what passes, in the order in which it is made."""

    def __init__(
        self,
        index: Index,
        scope: hooks.Scope,
        handles: TensorHandles,
        report: Callable[[Finding], None],
        allow: str | None,
    ) -> None:
        super().__init__(scope)
        self.findings: dict[Any, Finding] = {}
        self.excluded: set[tuple[int, str | None]] = set()
        self.backward = True
        self._index = index
        self._scope = scope
        self._handles = handles
        self._report = report
        self._signs = {None: (), "-inf": (-1,), "inf": (-1, 1)}[allow]
        self._calls: Counter[tuple[int, str]] = Counter()
        self._given: dict[int, Named] = {}
        self._blank: list[weakref.ref[Tensor]] = []
        self._passed: weakref.ref[Tensor] | None = None
        self._known: set[int] = set()
        self._first = self._start = 0
        self._copies: dict[int, Tensor] = {}
        self._run = -1
        self._faulty: set[int] = set()
        self._found_here = False
        self._pending: list[tuple[Tensor | None, _Passing | _Crossing]] = []
        self._suspects: dict[int | None, _Suspect] = {}
        self._held = 0
        self._settling: int | None = None
        self._keep = Keep("copy")
        owned = [getattr(module, name) for module, name in index.tensors.values()]
        self._owned = frozenset(map(id, owned))
        self._keep.owns(t for t in owned if isinstance(t, Tensor))

    # -- forward ------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        super().enter(module)
        if self.depth == 1 and self.current is module and not self._again():
            self._run += 1
            self._first = _sequence()
            self._known.clear()
            self._blank.clear()
            self._suspects.clear()
            self._found_here = False

    def given(self, module: nn.Module, value: Any, call: int) -> None:
        """A module is called; the outermost one's arguments are the model's own inputs."""
        given = self._given[id(module)] = _named(value, "input")
        if len(self._running) > 1:
            self._cross(given, None)
            self._follow([t for _, t in given], self._place(self._running[-2], None, None))
            return
        self._keep.called_with(t for _, t in given)
        for name, tensor in given:
            found = None if not _is_bad(tensor) else _describe(name, tensor)
            if found is not None and not found.finite and not self._is_mask(found):
                place = self._place(module, None, call)
                stack = self._stack(place)
                self._found(Finding("input", place.site("input"), "forward", self._run, [found], [], [], stack))

    def made(self, module: nn.Module, value: Any, call: int) -> None:
        """A module has run: check what no operation was seen to make."""
        inputs = self._given.pop(id(module), [])
        outputs = _named(value, "output")
        self._cross(outputs, module)
        fresh = [(name, t) for name, t in outputs if self._passed is None or t is not self._passed()]
        if fresh and not self._is_excluded(None, module):
            place = self._place(module, None, call)
            origins = [_origin(t) for _, t in inputs]
            storages = [_storage(t) for _, t in fresh]
            self._check(lambda: _Passing(place, "forward", inputs, fresh, storages, origins), [t for _, t in fresh])
            self._follow([t for _, t in fresh], place)
        if not self._running:
            self.settle()
            if self.backward:
                place = self._place(module, None, call)
                for name, tensor in outputs:
                    if tensor.requires_grad:
                        self._handles.add(hooks.on_gradient(tensor, _on_loss(self, place, name)))

    def before(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = {} if self._again() else {id(t): _copied(t) for t in _overwritten(name, args, kwargs)}
        self._copies = copies
        self._start = _sequence()
        return args, kwargs

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies, self._copies = self._copies, {}
        if isinstance(output, Tensor):
            outputs = [output]
        elif output is None:
            outputs = list(tree.tensors(list(args[:1]))) if copies else []
        else:
            outputs = [] if type(output) in (bool, int, torch.Size) else list(tree.tensors(output))
        if not outputs:
            return output
        if name in _STILL or name in _BLANK:
            if name in _BLANK:
                self._blank.append(weakref.ref(outputs[0]))
            self._passed = weakref.ref(outputs[-1])
            return output
        if self._again():
            self._follow(outputs, self._place(module, name, None))
            return output
        call = self._calls[id(module), name]
        self._calls[id(module), name] += 1
        if self._is_excluded(name):
            return output
        if self._blank and (name in _FILLS or "out" in kwargs):
            self._blank = [ref for ref in self._blank if ref() is not outputs[0]]

        def passing() -> _Passing:
            inputs, constants = _arguments(args, kwargs)
            inputs = [(n, t) for n, t in inputs if n.partition(".")[0] != "out"]
            origins = [_origin(t) for _, t in inputs]
            inputs = [(n, copies.get(id(t), t)) for n, t in inputs]
            made = [("output", t) for t in outputs]
            storages = [_storage(t) for t in outputs]
            return _Passing(self._place(module, name, call), "forward", inputs, made, storages, origins, constants)

        self._check(passing, outputs)
        if self.backward and torch.is_grad_enabled():
            self._follow(outputs, self._place(module, name, call))
        self._passed = weakref.ref(outputs[-1])
        return output

    def close(self) -> None:
        super().close()
        self._pending.clear()
        self._given.clear()
        self._suspects.clear()

    @staticmethod
    def _again() -> bool:
        """Whether this is a recomputation, whose values were checked the first time."""
        return graph_task() != -1

    def _place(self, module: nn.Module, op: str | None, call: int | None) -> _Place:
        inside = op is not None or (self._running and self._running[-1] is module)
        around = self._running if inside else [*self._running, module]
        return _Place(self._name(module), op, call, self._run, tuple(around))

    def _name(self, module: nn.Module) -> str:
        return next(iter(self._index.names(module)), "?")

    def _stack(self, place: _Place) -> list[str]:
        return [f"{self._name(m) or 'model'} ({type(m).__name__})" for m in place.around]

    def _is_excluded(self, op: str | None, *more: nn.Module) -> bool:
        if not self.excluded:
            return False
        around = [id(module) for module in (*self._running, *more)]
        return (around[-1], op) in self.excluded or any((m, None) in self.excluded for m in around)

    # -- backward -----------------------------------------------------------------------------

    def _follow(self, outputs: Iterable[Tensor], place: _Place) -> None:
        """Hook the steps of the backward pass that belong to a place, and those of functions that nobody saw."""
        if not self.backward:
            return
        todo = [t.grad_fn for t in outputs if t.requires_grad]
        while todo:
            node = todo.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number < self._first or number in self._known or number >= 1 << 62:  # AccumulateGrad has the largest
                continue
            self._known.add(number)
            todo.extend(following for following, _ in node.next_functions)
            name = node.name()
            if _STILL_NODES.fullmatch(name) is None:
                unseen = place.op is None or number < self._start
                here = place._replace(op=re.sub(r"Backward\d*$", "", name), call=None) if unseen else place
                self._handles.add(hooks.on_node(node, _on_node(self, here)))

    def gradients(
        self, place: _Place, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]
    ) -> None:
        """One step of the backward pass was made."""
        if self._scope.closed:
            return
        made = [g for g in outgoing if g is not None]

        def passing() -> _Passing:
            node = torch._C._current_autograd_node()
            came = [(str(i), g) for i, g in enumerate(incoming) if g is not None]
            went = [(str(i), g) for i, g in enumerate(outgoing) if g is not None]
            return _Passing(
                place, "backward", came, went, [], [], [], _saved(node), None if node is None else node.name()
            )

        self._check(passing, made)

    def loss(self, place: _Place, name: str, grad: Tensor) -> None:
        """The gradient of the outermost module's output came in."""
        if not self._scope.closed and not self.findings and _is_bad(grad):
            found = _describe(name, grad)
            if not found.finite:
                site = place.site("grad")
                self._found(Finding("loss", site, "backward", place.run, [found], [], [], self._stack(place)))

    # -- judging --------------------------------------------------------------------------------

    def _check(self, passing: Callable[[], _Passing], made: list[Tensor]) -> None:
        flags = [_flag(t) for t in made]
        if any(flag is True for flag in flags):
            self.settle()
            self._judge(passing())
        waiting = [flag for flag in flags if isinstance(flag, Tensor)]
        if waiting and not torch.cuda.is_current_stream_capturing():
            value = passing()
            value = value._replace(
                inputs=self._kept(value.inputs), outputs=self._kept(value.outputs), saved=self._kept(value.saved)
            )
            self._pending += [(flag, value) for flag in waiting]
            self._held += sum(t.nbytes for t in made)
            if value.phase == "backward" and self._settling != graph_task():
                self._settling = graph_task()
                hooks.after_backward(self.settle)
            if len(self._pending) >= _WINDOW or self._held > _WINDOW_BYTES:
                self.settle()

    def _cross(self, values: Named, left: nn.Module | None) -> None:
        """Something goes into a module or comes out of one."""
        if self._pending:
            self._pending.append((None, _Crossing(None, [_storage(t) for _, t in values], left)))
        elif self._suspects:
            self._judge_crossing(_Crossing(values, [_storage(t) for _, t in values], left))

    def _kept(self, values: Named) -> Named:
        # The model's own tensors stay as they are: nobody writes to them before the window ends.
        return [(name, t if id(t) in self._owned else self._keep.value(t)) for name, t in values]

    def settle(self) -> None:
        """Ask the device about all that is waiting."""
        pending, self._pending, self._held = self._pending, [], 0
        sums: dict[Any, list[Tensor]] = {}
        for flag, _ in pending:
            if flag is not None:
                sums.setdefault((flag.device, flag.dtype), []).append(flag)
        answers = {key: iter(torch.stack(some).tolist()) for key, some in sums.items()}
        last = None
        for flag, value in pending:
            if isinstance(value, _Crossing):
                self._judge_crossing(value)
            elif flag is not None and cmath.isfinite(next(answers[flag.device, flag.dtype])):
                for storage in value.storages:
                    self._suspects.pop(storage, None)  # overwritten, and well again
            elif value is not last:
                last = value
                self._judge(value)

    def _judge_crossing(self, it: _Crossing) -> None:
        for i, storage in enumerate(it.storages):
            suspect = self._suspects.get(storage)
            if suspect is not None and (it.values is None or _is_bad(it.values[i][1])):
                self._confirm(suspect)
        self._suspects = {key: s for key, s in self._suspects.items() if s.module is not it.left}

    def _confirm(self, suspect: _Suspect) -> None:
        self._suspects = {key: s for key, s in self._suspects.items() if s.finding is not suspect.finding}
        self._found(suspect.finding)

    def _judge(self, it: _Passing) -> None:
        blank = {_storage(t) for ref in self._blank if (t := ref()) is not None}
        made = [
            (n, t)
            for (n, t), storage in zip(it.outputs, it.storages or it.outputs, strict=True)
            if storage not in blank
        ]
        outputs = [_describe(name, t) for name, t in made]
        if all(s.finite for s in outputs):
            return  # the sum overflowed, not its terms
        inputs = [_describe(name, t) for name, t in it.inputs]
        if it.phase == "backward":
            self._judge_gradient(it, inputs, outputs)
        elif not self._is_propagated(it, inputs, outputs) and not self._is_deliberate(it, inputs, outputs):
            self._judge_value(it, inputs, outputs)

    def _judge_value(self, it: _Passing, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        owners = self._owners()
        owned = [(s, owners.get(o[:2], owners.get((o.storage, None)))) for s, o in zip(inputs, it.origins, strict=True)]
        weights = [s._replace(name=owner[1]) for s, owner in owned if owner is not None]
        plain = [s for s, owner in owned if owner is None]
        run, stack, site = it.place.run, self._stack(it.place), it.place.site()
        for found, owner in owned:
            if owner is not None and not found.finite and (owner[0] == "parameter" or not self._is_allowed(found)):
                kind, name = owner
                self._found(Finding(kind, Site(name), "forward", run, plain, weights, outputs, stack, site))
                return
        if self._found_here and (it.place.op is None or any(not s.finite for s in plain)):
            return
        if any(not s.finite and not self._is_allowed(s) for s in plain):
            if not self.findings:
                site = it.place.site("input")
                self._found(Finding("outside", site, "forward", run, plain, weights, outputs, stack))
        elif it.place.op is None:
            self._found(Finding("module", site, "forward", run, plain, weights, outputs, stack))
        else:
            finding = Finding("op", site, "forward", run, plain, weights, outputs, stack)
            if any(s.nan for s in outputs):
                self._found(finding)
            else:
                self._suspect(it, finding, it.place.around[-1])

    def _suspect(self, it: _Passing, finding: Finding, module: nn.Module) -> None:
        for (_, tensor), storage in zip(it.outputs, it.storages, strict=True):
            self._suspects[storage] = _Suspect(finding, module, tensor.detach())

    def _is_propagated(self, it: _Passing, inputs: list[Statistics], outputs: list[Statistics]) -> bool:
        """Whether it comes from an Inf under suspicion, which is then followed, or reported once it is a NaN."""
        for origin, found in zip(it.origins, inputs, strict=True):
            suspect = self._suspects.get(origin.storage)
            if suspect is not None and not found.finite:
                if any(s.nan for s in outputs):
                    self._confirm(suspect)
                else:
                    self._suspect(it, suspect.finding, suspect.module)
                return True
        return False

    def _judge_gradient(self, it: _Passing, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        place, saved = it.place, [_describe(name, t) for name, t in it.saved]
        came_bad = any(not s.finite for s in inputs)
        if self.findings and (came_bad or place.run in self._faulty or "Checkpoint" in str(it.node)):
            return  # it only passes on what was found before, or inside
        site = place.site("grad" if came_bad else "grad_input")
        kind: Any = "outside" if came_bad else "op" if place.op is not None else "module"
        self._found(
            Finding(kind, site, "backward", place.run, inputs, saved, outputs, self._stack(place), node=it.node)
        )

    def _is_allowed(self, found: Statistics) -> bool:
        """Whether all that is not finite is an infinity that may be there on purpose."""
        return not found.nan and (not found.inf or 1 in self._signs) and (not found.neg_inf or -1 in self._signs)

    def _is_mask(self, found: Statistics) -> bool:
        """Whether a model's input looks like a mask to be added to scores: -inf, and nothing above 0."""
        return self._is_allowed(found) and (found.max is None or found.max <= 0 or "mask" in found.name)

    def _is_deliberate(self, it: _Passing, inputs: list[Statistics], outputs: list[Statistics]) -> bool:
        """Whether an infinity is one that was written down, or only what became of one: a mask before a softmax."""
        if not all(self._is_allowed(s) for s in outputs):
            return False
        if it.place.op is None:
            return True  # of operations that were seen, each was judged when it ran
        lowest = min((torch.finfo(s.dtype).min for s in outputs if s.dtype.is_floating_point), default=-cmath.inf)
        for constant in it.constants:
            if constant == -cmath.inf or constant == cmath.inf or constant <= lowest:
                return True
        for origin, found in zip(it.origins, inputs, strict=True):
            if origin.learned:
                continue
            if not found.finite and self._is_allowed(found):
                return True
            if found.min is not None and found.min <= lowest and it.place.op in ("add", "add_", "sub", "sub_", "to"):
                return True  # finfo.min stands for -inf, and one step further it is
        return False

    def _owners(self) -> dict[Any, tuple[Any, str]]:
        """Parameters and buffers by memory and offset, and by memory alone: cuDNN puts several into one."""
        owners: dict[Any, tuple[Any, str]] = {}
        for name, (module, own) in self._index.tensors.items():
            tensor = getattr(module, own, None)
            if isinstance(tensor, Tensor) and (origin := _origin(tensor)).storage is not None:
                kind = "parameter" if own in module._parameters else "buffer"
                owners.setdefault(origin[:2], (kind, name))
                owners.setdefault((origin.storage, None), (kind, name))
        return owners

    def _found(self, finding: Finding) -> None:
        self._found_here = True
        if finding.phase == "forward":
            self._faulty.add(finding.run)
        key = (finding.kind, finding.site.every_call, finding.phase)
        known = self.findings.setdefault(key, finding)
        if known is not finding:
            known.times += 1
        self._report(known)


# Hooks hold the watcher and an address, never a tensor or a node: a graph that holds itself is never freed.


def _on_node(watcher: _Watcher, place: _Place) -> Callable[[Any, Any], None]:
    return lambda outgoing, incoming: watcher.gradients(place, outgoing, incoming)


def _on_loss(watcher: _Watcher, place: _Place, name: str) -> Callable[[Tensor], None]:
    return lambda grad: watcher.loss(place, name, grad)


def _saved(node: Any) -> Named:
    """What a step of the backward pass kept from the forward pass."""
    found: Named = []
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            with contextlib.suppress(*_CANNOT):  # freed already, or overwritten since
                found += _named(getattr(node, name), name.removeprefix("_saved_"))
    return found


def _copied(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except _CANNOT:
        return tensor


def _origin(tensor: Tensor) -> _Origin:
    learned = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return _Origin(_storage(tensor), int(tensor.storage_offset()) if tensor.layout == torch.strided else 0, learned)


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except _CANNOT:
        return None


# -- the door ---------------------------------------------------------------------------------------


class Guard:
    """A guard on a model, for as long as it is open: a context manager, or ``open`` and ``close``."""

    def __init__(self, session: Session, watcher: _Watcher) -> None:
        self._session = session
        self._watcher = watcher

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one for each site, in the order found."""
        return list(self._watcher.findings.values())

    def open(self) -> Guard:
        """Begin to watch."""
        self._session.open()
        return self

    def close(self) -> None:
        """Take every hook away. Closing twice does nothing."""
        self._close(quiet=False)

    remove = close

    def __enter__(self) -> Guard:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(quiet=error is not None)

    def _close(self, quiet: bool) -> None:
        if self._session.scope.closed:
            return
        self._session.close()
        missing = self._session.recording.missing
        if not quiet and len(missing) == len(self._session.sites):
            why = next(iter(missing.values()), "the model has no module that runs.")
            warnings.warn(f"the guard saw nothing: {why}", NeverRanWarning, stacklevel=3)

    def __repr__(self) -> str:
        return f"<guard: {len(self.findings)} found>"


def guard(
    model: nn.Module,
    *,
    action: Action = "raise",
    backward: bool = True,
    allow: Literal["-inf", "inf"] | None = "-inf",
    exclude: Selector | None = None,
) -> Guard:
    """Stop at the first NaN or Inf, forward or backward, and name the place that made it.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=-1), nn.Linear(2, 2))
    >>> _ = nn.init.constant_(model[0].bias, float("-inf"))
    >>> with guard(model, action="record") as g:
    ...     output = model(torch.ones(1, 2))
    >>> g.findings[0].kind, str(g.findings[0].site)
    ('parameter', '0.bias')

    ``action="raise"`` raises a ``GuardError`` there and then, ``"warn"`` warns once for each site, ``"record"`` only
    fills ``findings``. ``allow="-inf"`` lets pass a ``-inf`` that the model writes down itself, or is given in a mask,
    and what adds to it: NaN, and infinities that come from finite numbers, are never allowed. ``"inf"`` allows both
    signs, ``None`` neither. ``backward=False`` leaves gradients alone: a loss scaler meets infinite ones on purpose.
    What runs inside ``exclude`` is not judged.
    """
    if action not in ("raise", "warn", "record"):
        raise ValueError(f"action={action!r}: use 'raise', 'warn' or 'record'.")
    if allow not in ("-inf", "inf", None):
        raise ValueError(f"allow={allow!r}: use '-inf' (masks), 'inf' (both signs) or None.")
    session = Session(model, warn=False)
    watcher = _Watcher(session.index, session.scope, session.handles, _reporter(action), allow)
    watcher.backward = backward
    if exclude is not None:
        watcher.excluded = {(id(t.module), t.site.op) for t in resolve(session.index, exclude)}
    session.listen(watcher)
    for module in session.index.distinct.values():
        if is_callable(module):
            site = Site(session.index.names(module)[0])
            session.look(Target(site._replace(port="input"), module), _looker(watcher.given, module))
            session.look(Target(site, module), _looker(watcher.made, module))
    return Guard(session, watcher)


def _looker(function: Callable[[nn.Module, Any, int], None], module: nn.Module) -> Callable[[Any, int], None]:
    def look(value: Any, call: int) -> None:
        with torch._C.DisableTorchFunction():  # or the listener would hear all of this
            function(module, value, call)

    return look


def _reporter(action: Action) -> Callable[[Finding], None]:
    def report(finding: Finding) -> None:
        if action == "raise":
            raise GuardError(finding)
        if action == "warn" and finding.times == 1:
            warnings.warn(str(finding), GuardWarning, stacklevel=2)

    return report
