"""Every layer of every model in the zoo, held against bare PyTorch hooks that clone."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import BareHooks, Node, assert_same, copies, freeze, identities, process, silent, snapshot
from tests.zoo import FUSED, MANY_LAYERS, WITHOUT_GRADIENT, ZOO, Case
from torchhook.errors import NeverRanWarning
from torchhook.types import Recording

Context = Callable[[], AbstractContextManager[Any]]
Watching = Callable[[nn.Module], AbstractContextManager[Any]]

MODES: dict[str, Context] = {
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}

EVERYTHING = ("", "**", ":input", "**:input")


@contextmanager
def capturing(model: nn.Module, *selectors: str, **options: Any) -> Iterator[Recording]:
    """``th.capture``; what it warns of, modules that never ran, is looked at in ``rec.missing``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverRanWarning)
        with th.capture(model, *(selectors or EVERYTHING), **options) as recording:
            yield recording


class Played(NamedTuple):
    """One run of a copy of a model."""

    case: Case
    output: Any
    watch: Any
    left: Any
    """What the run left: the model and the process, and what the model was called with."""
    moved: bool
    """Whether a parameter or buffer is another object now, or lies elsewhere, or an input does."""


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def play(
    case: Case, mode: Context = torch.enable_grad, watching: Watching = nullcontext, backward: bool = False
) -> Played:
    case = copy.deepcopy(case)
    before = addresses(case)
    seed()
    with mode():
        with undisturbed(), watching(case.model) as watch:
            output = case.model(*case.args, **case.kwargs)
            if backward:
                sum(t.float().sum() for t in tensors(output) if t.requires_grad).backward()
        left = remains(case)
    return Played(case, output, watch, left, before != addresses(case))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Fail if the block changes what the process shares. A run to compare with might come too late to show it."""
    before = process()
    yield
    assert_same(before, process(), "process")


def remains(case: Case) -> Node:
    return Node("", {"model": snapshot(case.model), "given": freeze((case.args, case.kwargs))})


def addresses(case: Case) -> list[Any]:
    return [identities(case.model), [t.data_ptr() for t in tensors((case.args, case.kwargs))]]


def outputs(recording: Recording) -> dict[str, list[Any]]:
    return {s.path: [freeze(v) for v in recording.all(s)] for s in recording.sites if s.port == "output"}


def inputs(recording: Recording) -> dict[str, list[Any]]:
    """In the form in which a pre-hook gets them."""
    return {s.path: [_call(v) for v in recording.all(s)] for s in recording.sites if s.port == "input"}


def _call(value: Any) -> Any:
    return freeze((value.args, value.kwargs) if isinstance(value, th.Inputs) else ((value,), {}))


def calls(by_name: dict[str, list[Any]]) -> Node:
    return Node("sites", {n: Node("calls", {f"#{i}": v for i, v in enumerate(by_name[n])}) for n in sorted(by_name)})


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, themselves and not copies."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors(part)]
    if hasattr(value, "__dict__") and not callable(value):
        return [t for part in vars(value).values() for t in tensors(part)]
    return []


def overwrite(value: Any, number: int = 7) -> list[Tensor]:
    """Write to every tensor in a value, and return those that could be written to."""
    written = []
    for tensor in tensors(value):
        try:
            tensor.detach().fill_(number)
            written.append(tensor)
        except RuntimeError:  # an expanded tensor: its elements lie on top of each other
            pass
    return written


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model of the zoo, and where a gradient is wanted every one that has some."""
    if "case" in metafunc.fixturenames:
        left_out = WITHOUT_GRADIENT if "with_gradient" in metafunc.fixturenames else set()
        names = [name for name in ZOO if name not in left_out]
        slow = [pytest.param(name, marks=pytest.mark.slow) if name in MANY_LAYERS else name for name in names]
        metafunc.parametrize("case", slow, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """A model of the zoo; ``play`` runs copies of it."""
    made: Case = ZOO[request.param]()
    return made


@pytest.fixture(scope="module")
def bare(case: Case) -> Played:
    return play(case, watching=BareHooks)


# -- the four modes -----------------------------------------------------------------------------------------------


class Trio(NamedTuple):
    """The same run three times: without hooks, with bare hooks, with TorchHook."""

    plain: Played
    bare: Played
    mine: Played
    outputs: dict[str, list[Any]]
    inputs: dict[str, list[Any]]


@pytest.fixture(scope="module", params=list(MODES))
def trio(request: pytest.FixtureRequest, case: Case) -> Trio:
    mode = MODES[request.param]
    plain, bare, mine = (play(case, mode, watching) for watching in (nullcontext, BareHooks, capturing))
    outcome = [run._replace(output=freeze(run.output)) for run in (plain, bare, mine)]
    # What was kept must stay true whatever the caller does next with what the model returned or was given.
    with mode():
        overwrite((mine.output, mine.case.args, mine.case.kwargs))
    return Trio(*outcome, outputs(mine.watch), inputs(mine.watch))


@pytest.mark.shows("Models: outputs of torchvision, timm and transformers")
def test_every_output_is_what_a_bare_cloning_hook_saw(trio: Trio) -> None:
    assert_same(calls(trio.bare.watch.outputs), calls(trio.outputs), "outputs")


@pytest.mark.shows("Models: inputs of torchvision, timm and transformers")
def test_every_input_is_what_a_bare_cloning_pre_hook_saw(trio: Trio) -> None:
    assert_same(calls(trio.bare.watch.inputs), calls(trio.inputs), "inputs")


def test_outputs_are_recorded_in_the_order_in_which_they_passed(trio: Trio) -> None:
    records = trio.mine.watch.records()
    assert [r.site.path for r in records if r.site.port == "output"] == trio.bare.watch.order


def test_exactly_the_modules_that_no_bare_hook_saw_are_missing(trio: Trio) -> None:
    never = silent(trio.mine.case.model, trio.bare.watch.outputs)
    assert set(trio.mine.watch.missing) == never | {f"{name}:input" for name in never}


def test_the_model_computes_the_same_with_capture_on(trio: Trio) -> None:
    # PyTorch itself leaves the fused path of nn.TransformerEncoderLayer as soon as any hook is there, and the other
    # path rounds differently. What capture must not change is then the run under bare hooks.
    reference = trio.bare if trio.plain.case.name in FUSED else trio.plain
    assert_same(reference.output, trio.mine.output, "output")


def test_the_model_and_the_process_are_left_as_a_run_without_hooks_leaves_them(trio: Trio) -> None:
    assert_same(trio.plain.left, trio.mine.left, "left")
    assert trio.mine.moved == trio.plain.moved


def test_capture_without_selectors_takes_every_module_and_warns_of_those_that_never_ran(
    case: Case, bare: Played
) -> None:
    never = silent(bare.case.model, bare.watch.outputs)
    # Of a place that is kept for a layer which is not there, nothing is said.
    told = [name for name in never if type(bare.case.model.get_submodule(name)) is not nn.Identity]
    many = f"^{len(told)} modules? of all, since none was named, never ran"
    warned = pytest.warns(NeverRanWarning, match=many) if told else nullcontext()
    with warned:
        mine = play(case, watching=th.capture)
    assert set(mine.watch.missing) == never
    assert_same(calls(bare.watch.outputs), calls(outputs(mine.watch)), "outputs")


def test_what_is_kept_belongs_to_the_caller_alone(case: Case) -> None:
    run = play(case, watching=capturing)
    before = freeze(run.output)
    written = {i: overwrite(record.value, i % 100) for i, record in enumerate(run.watch.records())}
    shared = [i for i, some in written.items() for t in some if t.dtype != torch.bool and not (t == i % 100).all()]
    assert not shared, "writing to one record changed another"
    assert_same(before, freeze(run.output), "output")
    assert_same(run.left, remains(run.case), "left")


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_gradient(case: Case) -> Case:
    """A model of the zoo that does not turn gradients off by itself."""
    return case


def test_live_values_are_true_and_on_the_graph(case: Case, bare: Played) -> None:
    mine = play(case, watching=lambda model: capturing(model, keep="live"))
    assert_same(calls(bare.watch.outputs), calls(outputs(mine.watch)), "outputs", graph=True)
    assert_same(calls(bare.watch.inputs), calls(inputs(mine.watch)), "inputs", graph=True)
    on_graph = [t for record in mine.watch.records() for t in tensors(record.value) if t.requires_grad]
    assert bool(on_graph) == (case.name not in WITHOUT_GRADIENT)
    assert all(t.grad_fn is not None for t in on_graph)


@pytest.fixture(scope="module")
def trained(with_gradient: Case) -> Played:
    case = with_gradient
    return play(case, watching=BareHooks if case.name in FUSED else nullcontext, backward=True)


@pytest.mark.shows("Models: a training step of torchvision, timm and transformers")
@pytest.mark.parametrize("keep", ["copy", "live"])
def test_a_training_step_is_the_same_with_capture_on(with_gradient: Case, trained: Played, keep: str) -> None:
    mine = play(with_gradient, watching=lambda model: capturing(model, keep=keep), backward=True)
    assert any(p.grad is not None for p in trained.case.model.parameters())
    assert_same(trained.left, mine.left, "left")


def test_a_gradient_flows_from_a_live_value_as_from_a_clone_in_a_bare_hook(with_gradient: Case, middle: str) -> None:
    cloned: list[Tensor] = []

    def clone(*call: Any) -> None:
        cloned.extend(t.clone() for t in tensors(call[-1]))

    bare = play(with_gradient, watching=lambda model: hooked(model, middle, clone))
    mine = play(with_gradient, watching=lambda model: th.capture(model, middle, keep="live"))
    kept = [t for value in mine.watch.all(middle) for t in tensors(value)]
    expected, found = gradients(cloned, bare.case.model), gradients(kept, mine.case.model)
    assert any(gradient is not None for gradient in expected)
    assert_same(freeze(expected), freeze(found), "gradients")


def gradients(values: list[Tensor], model: nn.Module) -> tuple[Tensor | None, ...]:
    loss = sum(t.float().pow(2).sum() for t in values if t.requires_grad)
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


@contextmanager
def hooked(model: nn.Module, name: str, hook: Callable[..., None]) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# -- other ways out -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def middle(case: Case, bare: Played) -> str:
    """The module whose output comes halfway through the forward pass."""
    on_graph = [n for n in bare.watch.order if n and any(c.on_graph for c in copies(bare.watch.outputs[n][0]))]
    passed = on_graph or bare.watch.order
    return passed[len(passed) // 2]


class Broken(NamedTuple):
    """A run that ended in the middle."""

    error: BaseException | None
    watch: Any
    left: Any


def break_off(case: Case, name: str, error: BaseException, watching: Watching = nullcontext) -> Broken:
    """Run a copy of a model on which a hook of the user's own raises ``error``."""
    case = copy.deepcopy(case)
    seed()

    def fail(*call: Any) -> None:
        raise error

    caught = watch = None
    with undisturbed(), hooked(case.model, name, fail):
        try:
            with watching(case.model) as watch:
                case.model(*case.args, **case.kwargs)
        except BaseException as raised:
            caught = raised
        assert fail in case.model.get_submodule(name)._forward_hooks.values()
    return Broken(caught, watch, remains(case))


@pytest.fixture(scope="module")
def broken(case: Case, middle: str) -> Broken:
    """Broken off without any other hook: what must be left."""
    return break_off(case, middle, RuntimeError("enough"))


@pytest.fixture(scope="module")
def broken_bare(case: Case, middle: str) -> Broken:
    """Broken off under bare hooks: what must have been recorded."""
    return break_off(case, middle, RuntimeError("enough"), BareHooks)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_passes_unchanged_and_leaves_nothing_behind(
    case: Case, middle: str, broken: Broken, broken_bare: Broken, kind: type[BaseException]
) -> None:
    error = kind("enough")
    mine = break_off(case, middle, error, capturing)
    assert mine.error is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert_same(broken.left, mine.left, "left")
    assert_same(calls(broken_bare.watch.outputs), calls(outputs(mine.watch)), "outputs")
    assert_same(calls(broken_bare.watch.inputs), calls(inputs(mine.watch)), "inputs")


def test_an_early_stop_keeps_the_value_and_leaves_nothing_behind(
    case: Case, middle: str, bare: Played, broken: Broken
) -> None:
    case = copy.deepcopy(case)
    seed()
    went_on = False
    with undisturbed(), th.capture(case.model, middle, stop=True) as recording:
        case.model(*case.args, **case.kwargs)
        went_on = True
    assert not went_on
    assert_same(bare.watch.outputs[middle][0], freeze(recording[middle]), middle)
    assert_same(broken.left, remains(case), "left")


# -- files --------------------------------------------------------------------------------------------------------

SAVED = [
    "nn_lstm_tagger",
    "nn_gru_translator",
    "torchvision_resnet18",
    "torchvision_googlenet",
    "torchvision_retinanet",
    "timm_resnet10t_features",
    "transformers_gpt2",
    "transformers_bert",
    "transformers_albert",
    "transformers_mixtral",
    "transformers_t5",
    "transformers_clip",
    "transformers_llama_generate",
]


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("mode", MODES)
def test_a_recording_comes_back_from_a_file_as_it_was(name: str, mode: str, tmp_path: Path) -> None:
    run = play(ZOO[name](), MODES[mode], capturing)
    loaded = th.load(run.watch.save(tmp_path / "recording.safetensors"))
    assert loaded.keys() == run.watch.keys()
    assert loaded.missing == run.watch.missing
    assert_same(calls(outputs(run.watch)), calls(outputs(loaded)), "outputs")
    assert_same(calls(inputs(run.watch)), calls(inputs(loaded)), "inputs")
