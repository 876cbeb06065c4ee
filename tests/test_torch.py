"""Torch's private names, each taken away in turn: then the answer is right, or there is one clear error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.attention.bias
from torch import nn

from torchhook import _torch
from torchhook.errors import TorchVersionError, TorchVersionWarning

RIGHT = "right"
NAMES = {  # the name, what needs it, and what is said where it cannot be done without
    "torch._lazy_clone": ("captured", RIGHT),
    "torch.Tensor._is_view": ("captured", RIGHT),
    "torch.UntypedStorage._cdata": ("captured", RIGHT),
    "torch._C._are_functorch_transforms_active": ("in_vmap", RIGHT),
    "torch._C._functorch.peek_interpreter_stack": ("in_vmap", RIGHT),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("in_vmap", RIGHT),
    "torch._C._functorch.maybe_get_level": ("in_vmap", RIGHT),
    "torch._C._functorch.is_batchedtensor": ("in_vmap", "is_batchedtensor"),
    "torch._C._functorch.maybe_get_bdim": ("in_vmap", "maybe_get_bdim"),
    "torch._C._functorch.get_unwrapped": ("in_vmap", "get_unwrapped"),
    "torch.Tensor._version": ("gradients", "Tensor._version"),
    "torch.Tensor._base": ("gradients", "Tensor._base"),
    "torch._C._autograd._get_sequence_nr": ("gradients", RIGHT),
    "torch.autograd.Variable._execution_engine": ("nested_gradients", "Variable._execution_engine"),
    "torch._C._current_graph_task_id": ("checkpointed", RIGHT),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("checkpointed", RIGHT),
    "torch._C._current_autograd_node": ("guarded", RIGHT),
    "torch.multiprocessing.reductions.StorageWeakRef": ("guarded", RIGHT),
    "torch._C.DisableTorchFunction": ("guarded", RIGHT),
    "torch.nn.attention.bias.CausalBias._materialize": ("attended", "CausalBias._materialize"),
    "torch.utils._pytree.SUPPORTED_NODES": ("saved", RIGHT),
    "torch._make_per_tensor_quantized_tensor": ("saved", "_make_per_tensor_quantized_tensor"),
    "torch._C._len_torch_function_stack": ("heard", "_len_torch_function_stack"),
    "torch._C._get_function_stack_at": ("heard", "_get_function_stack_at"),
    "torch._C._pop_torch_function_stack": ("heard", "_pop_torch_function_stack"),
}


def without(scenario: str, *names: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name("vanished.py")), scenario, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_a_private_name_the_answer_is_right_or_one_clear_error(name: str) -> None:
    scenario, expected = NAMES[name]
    said = without(scenario, name)
    assert said == RIGHT if expected == RIGHT else said.startswith("TorchVersionError") and expected in said, said


@pytest.mark.slow
def test_without_any_private_name_torchhook_imports_and_captures() -> None:
    assert without("captured", *NAMES) == RIGHT


@pytest.mark.shows("Checkpointing: a torch that does not show which call is recomputed", error="SessionError")
@pytest.mark.slow
def test_checkpoints_that_cannot_be_seen_into_are_refused() -> None:
    assert "does not let TorchHook see which call it is" in without("not_understood")


def test_checkpoints_are_seen_into_and_that_is_known() -> None:
    assert _torch.understands_checkpoints()


def test_a_name_on_the_list_is_there_today() -> None:
    """A name that torch has dropped meanwhile is no longer tested by taking it away."""
    for path in NAMES:
        owner: object = torch
        for part in path.split(".")[1:]:
            owner = getattr(owner, part)


def imported_beside(version: str) -> list[str]:
    """What a process prints that imports the library beside a torch which says that it is of some version."""
    code = f"""
import warnings, torch
torch.__version__ = torch.torch_version.TorchVersion({version!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import torchhook; import torchhook as again
    except Exception as error:
        print(type(error).__name__, error)
for w in caught:
    print(w.category.__name__, w.filename, w.lineno, w.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.shows("Versions: a warning of a torch that nobody has tried")
@pytest.mark.slow
def test_a_torch_that_nobody_has_tried_is_warned_about_once_at_the_users_import() -> None:
    (said,) = imported_beside("2.16.0a0+git1234")
    # The line of the program that imports the library, not one of the library's or of Python's own.
    assert said.startswith("TorchVersionWarning <string> 7 torch 2.16.0a0+git1234 is newer than any"), said


@pytest.mark.shows("Versions: torch before 2.6", error="TorchVersionError")
@pytest.mark.slow
def test_a_torch_that_is_too_old_is_refused_at_the_import() -> None:
    assert imported_beside("2.5.1+cpu") == [
        'TorchVersionError TorchHook needs torch 2.6 or newer, and this is torch 2.5.1+cpu: pip install "torch>=2.6"'
    ]


@pytest.mark.parametrize("found", ["2.16.0", "2.20.1+cu140", "3.0.0.dev20300101"])
def test_every_later_release_is_newer_than_what_was_tried(found: str) -> None:
    with pytest.warns(TorchVersionWarning, match=rf"^torch {re.escape(found)} is newer .*\(up to 2\.15\)"):
        _torch._check_version(found)


@pytest.mark.parametrize("found", [torch.__version__, "2.6.0", "2.15.3+cu132", "our-own-build"])
def test_a_torch_that_was_tried_is_taken_without_a_word(found: str) -> None:
    _torch._check_version(found)  # warnings are errors here


@pytest.mark.parametrize("found", ["2.5.1", "2.5.0a0+git1234", "1.13.1"])
def test_every_release_before_the_oldest_is_refused(found: str) -> None:
    with pytest.raises(TorchVersionError, match=rf"needs torch 2\.6 or newer, and this is torch {re.escape(found)}"):
        _torch._check_version(found)


def test_the_torch_of_these_tests_is_not_newer_than_what_the_library_says_was_tried() -> None:
    """Whoever runs the suite on a newer one writes it down, where it is said to users."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= _torch.NEWEST_TESTED


def test_the_oldest_torch_is_the_one_that_is_installed_with_the_package() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, _torch.OLDEST))}"' in pyproject


def test_a_module_is_known_to_run() -> None:
    class Counts(nn.Module):
        def forward(self, deeper: int) -> int:
            return self(deeper - 1) if deeper else _torch.times_running(self)

    module = Counts()
    assert [module(0), module(1), module(3)] == [1, 2, 4]
    assert _torch.times_running(module) == 0
