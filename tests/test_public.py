"""The public face: what is exported, what importing costs, and the walls between the files."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import torchhook

ROOT = Path(torchhook.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users_of(pattern: str) -> set[str]:
    """The files whose code, comments and docstrings aside, has the pattern in a name."""
    found = set()
    for path in FILES:
        for node in ast.walk(TREES[path]):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.alias):
                names = [node.name]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if any(re.search(pattern, name) for name in names):
                found.add(relative(path))
    return found


# -- names -------------------------------------------------------------------------------------------


def test_all_is_sorted_without_repeats_and_every_name_is_there() -> None:
    names = torchhook.__all__
    assert list(names) == sorted(set(names))
    missing = [name for name in names if not hasattr(torchhook, name)]
    assert missing == []


def test_all_is_complete() -> None:
    """Whatever the front door imports by name is public; submodules show up there by themselves."""
    statements = TREES[ROOT / "__init__.py"].body
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert {n for n in names if not n.startswith("_")} <= set(torchhook.__all__)
    visible = {n for n, v in vars(torchhook).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert visible <= set(torchhook.__all__)


def test_the_front_door_holds_re_exports_and_nothing_else() -> None:
    statements = TREES[ROOT / "__init__.py"].body
    functions = [node.name for node in statements if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert set(functions) <= {"__getattr__", "__dir__"}


def test_the_names_of_the_contract_are_there() -> None:
    contract = {"capture", "run", "layers", "load", "Recording", "Session", "Site", "Inputs"}
    seeds = {
        "HookManager",
        "get_layer_candidates",
        "FeatureLayer",
        "FeatureLayers",
        "FeatureExtractor",
        "VerboseExecution",
        "gradient_clipper",
        "Hook",
        "count_parameters",
        "model_summary",
    }
    assert contract | seeds <= set(torchhook.__all__)


@pytest.mark.parametrize("name", [n for n in torchhook.__all__ if n != "__version__"])
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(torchhook, name)
    doc = inspect.cleandoc(vars(value).get("__doc__") or "" if isinstance(value, type) else value.__doc__ or "")
    first = doc.splitlines()[0] if doc else ""
    assert first
    assert first[0].isupper() or first[0] in "`("
    assert re.search(r"[.:…]$", doc.split("\n\n")[0].strip()), f"{name}: the first sentence does not end"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    doc = ast.get_docstring(TREES[path])
    assert doc
    assert doc[0].isupper() or doc[0] == "`"


def test_every_public_method_of_a_public_class_is_annotated() -> None:
    bare = []
    for name in torchhook.__all__:
        value = getattr(torchhook, name)
        if not isinstance(value, type):
            continue
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("torchhook"):
                signature = inspect.signature(function)
                if signature.return_annotation is inspect.Signature.empty:
                    bare.append(f"{name}.{method}")
    assert bare == []


def test_the_version_is_one_and_looks_like_one() -> None:
    from importlib.metadata import version

    assert re.fullmatch(r"\d+\.\d+\.\d+([abrc.]\S+)?", torchhook.__version__)
    assert version("torchhook") == torchhook.__version__


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()


# -- what importing costs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """The modules that a fresh interpreter has after ``import torchhook``, less those that ``import torch`` loads."""
    code = (
        "import json, sys, torch, numpy; before = set(sys.modules); import torchhook; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    command = [sys.executable, "-W", "error::DeprecationWarning:torchhook", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "package",
    [
        "matplotlib",
        "transformers",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torchvision",
        "timm",
        "ray",
        "PIL",
        "pandas",
    ],
)
def test_importing_torchhook_does_not_import(loaded: set[str], package: str) -> None:
    assert "torchhook._core.session" in loaded
    assert [name for name in loaded if name == package or name.startswith(package + ".")] == []


def test_importing_torchhook_leaves_the_process_as_it_was() -> None:
    code = """
import random, signal, sys, threading, warnings
import numpy, torch
def state():
    return (
        torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.get_num_threads(), threading.active_count(), list(warnings.filters), sys.excepthook,
        torch.nn.Module.__call__, torch.Tensor.__torch_function__, signal.getsignal(signal.SIGINT),
        len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks),
    )
before = state()
import torchhook
assert state() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- walls -----------------------------------------------------------------------------------------------------


def test_only_hooks_registers_hooks() -> None:
    calling = {
        relative(path)
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("register_")
        and node.func.attr != "register_pytree_node"
    }
    assert calling == {"_core/hooks.py"}


def test_only_keep_knows_copy_on_write() -> None:
    assert users_of(r"_lazy_clone|_is_cow|_data_address") == {"_core/keep.py"}


def test_only_nodes_knows_the_pytree() -> None:
    using = {relative(path) for path in FILES if any("_pytree" in name for name in imported(path))}
    assert using == {"_values/nodes.py"}
    assert users_of(r"pytree|tree_flatten|tree_map") == {"_values/nodes.py"}


def test_nothing_replaces_forward_or_wraps_torch() -> None:
    for path in FILES:
        for node in ast.walk(TREES[path]):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute):
                    assert target.attr not in ("forward", "__call__"), f"{path}:{node.lineno}"
                    assert ast.unparse(target.value).split(".")[0] != "torch", f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", ["transformers", "torchlens", "nnsight", "captum"])
def test_the_library_never_imports(package: str) -> None:
    assert [relative(p) for p in FILES if any(n.split(".")[0] == package for n in imported(p))] == []


def test_matplotlib_is_imported_in_the_plotting_rooms_only() -> None:
    using = {relative(p) for p in FILES if any(n.split(".")[0] == "matplotlib" for n in imported(p))}
    assert all(re.search(r"plot|report|demo", name) for name in using)


def test_no_file_is_read_by_pickle() -> None:
    reading = [*(ROOT / "_recording").glob("*.py"), ROOT / "_values/loaded.py"]
    using = {relative(p) for p in reading for n in imported(p) if n.split(".")[0] in ("pickle", "dill", "shelve")}
    assert using == set()
    assert [relative(p) for p in reading if "torch.load" in ast.unparse(TREES[p])] == []
