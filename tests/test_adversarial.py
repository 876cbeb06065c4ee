"""Every model of tests/models.py: what is captured is what a bare cloning hook saw, and nothing is left behind."""

from __future__ import annotations

import random
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests.models import CASES, GRAD, INFERENCE, MODES, Case, Opaque, frozen, tensors_in, watch
from tests.oracle import warned
from torchhook.errors import NeverRanWarning, SessionError
from torchhook.types import Site

BY_CLONE = {
    "GrowTheStorage",  # torch cannot write to a copy-on-write storage after it grew (internal assert in COW.cpp)
    "FreeAndRefillTheStorage",
    "NumpyTwinOfDetached",  # a raw pointer taken before the capture goes past copy-on-write
    "NumpyTwinOfAnAttribute",
    "NumpyViewMadeBefore",
}
"""What shared memory cannot do: these need ``keep="clone"``, as the front page says."""

SCRIPTED = {"ScriptedPart": ("1", "1.0", "1.1")}
"""Modules that take no hooks: they are reported."""

KNOWN = {
    "OutputCyclicObject": "an object that contains itself is kept by reference: there is no tree to rebuild",
}
"""What is known to be wrong, with the reason; a case that is put right fails here until its line goes."""


def keep_of(case: Case) -> str:
    return "clone" if case.name in BY_CLONE else "copy"


def param(case: Case, *mode: str, known: Mapping[str, str] = KNOWN) -> Any:
    marks = [pytest.mark.xfail(reason=known[case.name])] if case.name in known else []
    return pytest.param(case, *mode, id="-".join([case.name, *mode]), marks=marks)


class Ran(NamedTuple):
    """One run of a case, as plain data."""

    output: Any
    gradients: Any
    state: Any
    random: Any


def run(case: Case, model: nn.Module, mode: str) -> tuple[Any, Any, tuple[Any, Any]]:
    """Call the model, and its backward pass where it has one; its output at once, as data and as it is."""
    given = case.arguments()
    torch.manual_seed(2)
    with MODES[mode]():
        output = case.run(model, *given)
        seen = frozen(output)
        if mode == GRAD and case.backward:
            parts = [t for t in tensors_in(output) if t.requires_grad]
            if parts:
                torch.stack([t.real.sum() for t in parts]).sum().backward()
    return seen, output, given


def random_state() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def state_of(model: nn.Module) -> Any:
    """Everything that one can find on the modules of a model, hooks and plain attributes among it."""
    return [
        (
            name,
            type(module).__name__,
            {key: plain(value) for key, value in vars(module).items() if key not in ELSEWHERE},
            {key: (frozen(t), t.requires_grad) for key, t in module.named_parameters(recurse=False)},
            {key: (frozen(t), t.requires_grad) for key, t in module.named_buffers(recurse=False)},
            [key for key, _ in module.named_children()],
        )
        for name, module in model.named_modules()
    ]


ELSEWHERE = ("_parameters", "_buffers", "_modules", "_torchdynamo_wrapper_id")


def plain(value: Any) -> Any:
    """An attribute as data: tensors and containers by what is in them, any other object by its type."""
    if isinstance(value, (Tensor, str, int, float, np.ndarray)) or value is None:
        return frozen(value)
    if isinstance(value, OrderedDict):  # hooks by number: the numbers count up over the whole process
        return [plain(item) for item in value.values()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return type(value).__name__


def gradients_of(model: nn.Module, given: Any) -> Any:
    held = [*model.parameters(), *tensors_in(given)]
    return [None if t.grad is None or isinstance(t.grad, Opaque) else frozen(t.grad) for t in held if t.is_leaf]


def ran(case: Case, model: nn.Module, mode: str) -> tuple[Ran, Any, Any]:
    seen, output, given = run(case, model, mode)
    return Ran(seen, gradients_of(model, given), state_of(model), random_state()), output, given


def as_oracle(value: Any) -> Any:
    return frozen(tuple(value) if isinstance(value, th.Inputs) else value)


def overwrite(values: Any) -> None:
    """Write to everything that the caller or the model still holds."""
    with torch.inference_mode():
        for tensor in tensors_in(values):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and has_memory(tensor):
                tensor.untyped_storage().fill_(1)


def has_memory(tensor: Tensor) -> bool:
    if tensor.is_quantized or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.untyped_storage().nbytes() > 0


def hooks_of(names: dict[str, nn.Module]) -> dict[tuple[str, str], Any]:
    """The very hooks in the very dicts."""
    return {
        (name, key): (id(value), list(value.items()))
        for name, module in names.items()
        for key, value in vars(module).items()
        if isinstance(value, OrderedDict) and "hooks" in key
    }


@pytest.mark.shows("Models: nasty small ones, captured")
@pytest.mark.parametrize(("case", "mode"), [param(case, mode) for case in CASES.values() for mode in case.modes])
def test_captured_is_what_a_bare_hook_saw_and_the_model_never_notices(case: Case, mode: str) -> None:
    with warned() as caught:
        plain, _, _ = ran(case, case.model(), mode)

        torch.manual_seed(0)
        watched = case.model() if case.original is None else case.original()
        with watch(case.names(watched)) as (outputs, inputs):
            run(case, watched, mode)

        model = case.model()
        names = case.names(model)
        hooks = hooks_of(names)
        keep = keep_of(case)
        session = th.capture(model, keep=keep)
        with th.capture(model, port="input", keep=keep) as rec_in, session as rec_out:
            captured, output, given = ran(case, model, mode)
            state_inside = captured.state
        captured = captured._replace(state=state_of(model), random=random_state())

    assert captured == plain
    assert state_inside != plain.state, "the hooks were never there"
    if case.name != "LazyLayers":  # a lazy module takes its own hooks away when it first runs
        assert hooks_of(names) == hooks

    overwrite([output, given, list(model.parameters()), list(model.buffers())])
    for recording, port, oracle in ((rec_out, "output", outputs), (rec_in, "input", inputs)):
        for name, expected in oracle.items():
            site = Site(name, port=port)
            assert [as_oracle(v) for v in (recording.all(site) if expected else [])] == expected, (name, port)
        silent = {str(Site(name, port=port)) for name, expected in oracle.items() if not expected}
        scripted = {name for name, cause in recording.missing.items() if "TorchScript" in cause}
        assert set(recording.missing) - scripted == silent
        assert scripted == {str(Site(name, port=port)) for name in SCRIPTED.get(case.name, ())}
    ours = [w for w in caught if issubclass(w.category, NeverRanWarning)]
    assert len(ours) == sum(bool(found) for rec in (rec_in, rec_out) for found in (rec.missing, rec.replaced))


@pytest.mark.parametrize("case", [param(case) for case in CASES.values()])
def test_writing_to_a_captured_value_changes_nothing_in_the_model(case: Case) -> None:
    mode = case.modes[-1]
    with warned():
        plain, _, _ = ran(case, case.model(), mode)
        model = case.model()
        keep = keep_of(case)
        inputs = th.capture(model, port="input", keep=keep)
        with th.capture(model, keep=keep) as rec, inputs as rec_in:
            _, output, _ = run(case, model, mode)
        overwrite([rec.all(site) for site in rec.sites] + [rec_in.all(site) for site in rec_in.sites])
        assert frozen(output) == plain.output
        assert state_of(model) == plain.state


# Its first run has no graph that a value could be on, so that it is refused.
NO_GRAPH = {"CheckpointedReentrant"}


@pytest.mark.parametrize(
    "case", [param(case) for case in CASES.values() if GRAD in case.modes and case.name not in NO_GRAPH]
)
def test_live_values_are_true_and_on_the_graph(case: Case) -> None:
    with warned():
        plain, _, _ = ran(case, case.model(), GRAD)
        torch.manual_seed(0)
        watched = case.model() if case.original is None else case.original()
        on_graph: dict[str, list[list[bool]]] = {}

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if torch._C._current_graph_task_id() == -1:
                    on_graph.setdefault(name, []).append([t.requires_grad for t in tensors_in(output)])

            return hook

        handles = [module.register_forward_hook(note(name)) for name, module in case.names(watched).items()]
        with watch(case.names(watched)) as (outputs, _):
            run(case, watched, GRAD)
        for handle in handles:
            handle.remove()

        model = case.model()
        with th.capture(model, keep="live") as rec:
            captured, _, _ = ran(case, model, GRAD)
    assert captured.output == plain.output
    assert captured.gradients == plain.gradients
    for name, expected in outputs.items():
        values = rec.all(Site(name)) if expected else []
        assert [frozen(v) for v in values] == expected, name
        assert [[t.requires_grad for t in tensors_in(v)] for v in values] == on_graph.get(name, []), name


@pytest.mark.parametrize("name", sorted(NO_GRAPH))
def test_live_values_without_a_graph_are_refused(name: str) -> None:
    with warned(), pytest.raises(SessionError, match="use_reentrant=False"):
        with th.capture(model := CASES[name].model(), keep="live"):
            ran(CASES[name], model, GRAD)


@pytest.mark.parametrize("case", [param(case, known={}) for case in CASES.values()])
def test_every_key_that_a_recording_gives_reads_back_its_value(case: Case) -> None:
    with warned():
        model = case.model()
        keep = keep_of(case)
        inputs = th.capture(model, port="input", keep=keep)
        with th.capture(model, keep=keep) as rec, inputs as rec_in:
            run(case, model, case.modes[0])
    for recording in (rec, rec_in):
        pairs = list(recording.items())
        assert len(pairs) == sum(len(recording.all(site)) for site in recording.sites)
        for key, value in pairs:
            assert recording[key] is value, key
            assert key in recording


class Branch:
    """Counts how often its attributes are read."""

    reads = 0

    def __init__(self, below: Any) -> None:
        vars(self).update(left=below, right=below)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            Branch.reads += 1
        return super().__getattribute__(name)


def test_an_object_whose_parts_are_shared_is_looked_at_once() -> None:
    value: Any = None
    for _ in range(10):
        value = Branch(value)
    Branch.reads = 0
    model = nn.Sequential(nn.Identity())
    with th.capture(model, "0"):
        model(value)
    assert Branch.reads < 20 * 10  # a few for each of the ten, not two for each path


def test_a_long_chain_of_objects_does_not_end_the_forward_pass() -> None:
    value: Any = None
    for _ in range(1000):
        value = types.SimpleNamespace(next=value)
    model = nn.Sequential(nn.Identity())
    with th.capture(model, "0"):
        assert model(value) is value


@pytest.mark.shows("torch.func: captures under vmap")
def test_what_was_captured_under_vmap_can_be_used_afterwards() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 2, 4)
    for dim in (0, 1):
        with torch.no_grad(), th.capture(model) as rec:
            torch.vmap(model, in_dims=dim, out_dims=dim)(x)
        whole = F.linear(x.movedim(dim, 0), model.weight, model.bias)
        torch.testing.assert_close(rec[""] + 0, whole)


def test_recomputed_calls_are_counted_and_not_recorded_twice() -> None:
    case = CASES["CheckpointedNew"]
    model = case.model()
    with th.capture(model, "block.0", "block.0:input") as rec:
        run(case, model, GRAD)
    assert len(rec.all("block.0")) == len(rec.all("block.0:input")) == 1
    assert rec.recomputed == {"block.0": 1, "block.0:input": 1}


def test_a_channels_last_value_stays_channels_last() -> None:
    case = CASES["ChannelsLast"]
    model = case.model()
    with th.capture(model, "0") as rec, th.capture(model, "0", keep="live") as live:
        run(case, model, GRAD)
    assert rec["0"].is_contiguous(memory_format=torch.channels_last)
    assert live["0"].is_contiguous(memory_format=torch.channels_last)


def test_there_are_enough_models() -> None:
    assert len(CASES) >= 64
    assert sum(INFERENCE in case.modes for case in CASES.values()) >= 64


def test_the_oracle_sees_a_value_that_is_overwritten() -> None:
    model = CASES["InplaceActivations"].model()
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda m, a, o: kept.append(o))
    with watch({"0": model[0]}) as (outputs, _):
        run(CASES["InplaceActivations"], model, "no_grad")
    assert outputs["0"] != [frozen(kept[0])]
