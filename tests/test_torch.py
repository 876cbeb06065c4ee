"""Torch's private names, each taken away in turn: then the answer is right, or there is one clear error."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.attention.bias
from torch import nn

from tests.sources import TREES, called, strings
from torchhook import _torch
from torchhook._torch import releases

RIGHT = "right"
NAMES = {  # the name, what needs it, and what is said where it cannot be done without
    "torch._lazy_clone": ("captured", RIGHT),
    "torch._C._is_cow_tensor": ("captured", RIGHT),
    "torch._C._data_address": ("captured", RIGHT),
    "torch.Tensor._use_count": ("captured", RIGHT),
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
    "torch.autograd.forward_ad._current_level": ("captured", RIGHT),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("checkpointed", RIGHT),
    "torch._C._len_torch_dispatch_stack": ("selective", RIGHT),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": ("selective", "_get_current_dispatch_mode_stack"),
    "torch._C._pop_torch_dispatch_stack": ("selective", "_pop_torch_dispatch_stack"),
    "torch._C._current_autograd_node": ("guarded", RIGHT),
    "torch.multiprocessing.reductions.StorageWeakRef": ("guarded", RIGHT),
    "torch._C.DisableTorchFunction": ("guarded", RIGHT),
    "torch.nn.attention.bias.CausalBias._materialize": ("attended", "CausalBias._materialize"),
    "torch.utils._pytree.SUPPORTED_NODES": ("saved", RIGHT),
    "torch._make_per_tensor_quantized_tensor": ("saved", "_make_per_tensor_quantized_tensor"),
    "torch._make_per_channel_quantized_tensor": ("saved", "_make_per_channel_quantized_tensor"),
    "torch.Tensor._indices": ("saved", RIGHT),
    "torch._C._len_torch_function_stack": ("heard", "_len_torch_function_stack"),
    "torch._C._get_function_stack_at": ("heard", "_get_function_stack_at"),
    "torch._C._pop_torch_function_stack": ("heard", "_pop_torch_function_stack"),
    "torch._foreach_norm": ("watched", RIGHT),
    "torch._foreach_copy_": ("watched", RIGHT),
    "torch._foreach_sub_": ("watched", RIGHT),
}


NEEDED = {  # by torch itself, so that a process without them would show nothing
    "torch.nn.Module._call_impl",
    "torch._TorchCompileInductorWrapper",
    "torch.utils.checkpoint._CheckpointFrame",  # "not_understood" stands for these two
    "torch.utils.checkpoint.CheckpointFunction._backward_cls",
    "torch._native_multi_head_attention",
    "torch._C._push_on_torch_function_stack",
    "torch._C._push_on_torch_dispatch_stack",
}
# What the oldest torch does not have yet: there, every other test shows what is done without it.
LATER = {"torch._C._autograd._top_saved_tensors_default_hooks"}


def is_there(path: str) -> bool:
    owner: object = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part, None)
    return owner is not None


def without(scenario: str, *names: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name("vanished.py")), scenario, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_a_private_name_the_answer_is_right_or_one_clear_error(name: str) -> None:
    scenario, expected = NAMES[name]
    said = without(scenario, *filter(is_there, [name]))
    assert said == RIGHT if expected == RIGHT else said.startswith("TorchVersionError") and expected in said, said


@pytest.mark.slow
def test_without_any_private_name_torchhook_imports_and_captures() -> None:
    assert without("captured", *filter(is_there, NAMES)) == RIGHT


@pytest.mark.shows("Checkpointing: a torch that does not show which call is recomputed", error="SessionError")
@pytest.mark.slow
def test_checkpoints_that_cannot_be_seen_into_are_refused() -> None:
    assert "does not let TorchHook see which call it is" in without("not_understood")


def test_checkpoints_are_seen_into_and_that_is_known() -> None:
    assert _torch.understands_checkpoints()


def test_every_name_that_is_looked_for_is_on_the_list() -> None:
    owners = {"nn.Module": "torch.nn.Module", "Tensor": "torch.Tensor", "checkpoint": "torch.utils.checkpoint"}
    listed = {*NAMES, *NEEDED}
    found = set()
    for node in (node for file, tree in TREES.items() if file.startswith("_torch/") for node in ast.walk(tree)):
        if called(node) == "find" and strings(node.args[:1]):
            owner = ast.unparse(node.args[2]) if len(node.args) > 2 else "torch"
            found.add(f"{owners.get(owner, owner)}.{node.args[0].value}")
    private = {path for path in found if "._" in path.replace(".__", ".")}
    assert len(private) > 20
    # A part of one that is taken away is gone with it.
    assert {path for path in private if not any(f"{path}.".startswith(f"{name}.") for name in listed)} == {
        "torch._C._functorch",  # of which every name is taken away by itself
        "torch.utils._pytree",
    }


def test_a_name_on_the_list_is_there_today() -> None:
    """A name that torch has dropped meanwhile is no longer tested by taking it away."""
    oldest = torch.__version__.startswith(".".join(map(str, releases.OLDEST)) + ".")
    assert {path for path in NAMES if not is_there(path)} <= (LATER if oldest else set())


def test_a_module_is_known_to_run() -> None:
    class Counts(nn.Module):
        def forward(self, deeper: int) -> int:
            return self(deeper - 1) if deeper else _torch.times_running(self)

    module = Counts()
    assert [module(0), module(1), module(3)] == [1, 2, 4]
    assert _torch.times_running(module) == 0


def test_the_only_owner_of_memory_keeps_it_and_others_move() -> None:
    made = torch.arange(12.0).view(3, 4)
    lazy = _torch.lazy_clone(made)
    assert _torch.start_of(lazy) == _torch.start_of(lazy[1:]) == _torch.start_of(made)
    assert not _torch.is_only_owner(lazy)
    assert _torch.start_of(lazy) != _torch.start_of(made)
    assert torch.equal(lazy, made)
    lazy, start = _torch.lazy_clone(made), _torch.start_of(made)
    del made
    assert _torch.is_only_owner(lazy)
    assert _torch.start_of(lazy) == start
    assert not _torch.is_lazy_clone(lazy)


def test_where_nobody_can_look_at_shared_memory_nobody_is_its_only_owner(monkeypatch) -> None:
    monkeypatch.setattr(_torch.memory, "_start", None)
    lazy, made = _torch.lazy_clone(torch.ones(3)), torch.ones(3)
    assert not _torch.is_only_owner(lazy)
    assert _torch.is_lazy_clone(lazy)
    assert _torch.start_of(lazy) != _torch.start_of(made)
