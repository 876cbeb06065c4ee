"""The run of a model whose values are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.keep import Keep
from torchhook._core.offload import has_offloaded
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._diff import sides
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook._words import and_more


def every_output(index: Index) -> list[Target]:
    # By identity: a shared module comes once, under its first name.
    found: dict[int, Target] = {}
    for path, module in index.modules.items():
        if is_callable(module):
            found.setdefault(id(module), Target(Site(path), module))
    return list(found.values())


def record(model: nn.Module, index: Index, targets: Sequence[Target], inputs: Any, *beside: Session) -> Recording:
    """What passes the targets in one run; other sessions may be open ``beside`` it."""
    session = Session(model, index=index, warn=False)
    session.record(targets, Keep())
    with session as recording:
        # The others come second: what they change is changed after it was recorded.
        _run_within(beside, model, inputs)
    return sides.with_calls(recording) if sides.is_program(model) else recording


# No ExitStack: one that an interrupt leaves holds itself, and with it hooks, until the collector comes by.
def _run_within(sessions: Sequence[Session], model: nn.Module, inputs: Any) -> None:
    if not sessions:
        calling.call(model, fitting(model, inputs))
        return
    with sessions[0]:
        _run_within(sessions[1:], model, inputs)


def fitting(model: nn.Module, inputs: Any) -> Inputs:
    """The inputs on the model's device and in its floating-point dtype, where it has only one."""
    parameters = [p for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    # One that is offloaded moves what it gets by itself: its parameters are nowhere now.
    devices = set() if has_offloaded(model) else {p.device for p in parameters}
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    # A model in several dtypes or on several devices converts what it gets by itself: no single one would be right.
    device = devices.pop() if len(devices) == 1 else None
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def fit(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    fitted: Inputs = tree.map_tensors(fit, calling.arguments(inputs))
    return fitted


def modes(a: Index, b: Index) -> list[str]:
    """What a train-against-eval comparison should say by itself."""
    odd = [path for path, m in a.modules.items() if path in b.modules and b.modules[path].training != m.training]
    if not odd:
        return []
    side = "A" if a.modules[odd[0]].training else "B"
    some = ", ".join(repr(path) for path in odd[:3] if path) or "the model itself"
    return [f"in training mode in {side} only: {some}{and_more(len(odd) - 3)}"]
