"""The public face: which names there are, what they say of themselves, and what importing costs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchhook
from torchhook import errors, types

ROOT = Path(torchhook.__file__).parent
FRONT_DOOR = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")).body


# -- names -------------------------------------------------------------------------------------------


def test_all_is_sorted_without_repeats_and_every_name_is_there() -> None:
    names = torchhook.__all__
    assert list(names) == sorted(set(names))
    missing = [name for name in names if not hasattr(torchhook, name)]
    assert missing == []


def test_all_is_complete() -> None:
    """Whatever the front door imports by name is public; submodules show up there by themselves."""
    imports = [node for node in FRONT_DOOR if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert {n for n in names if not n.startswith("_")} <= set(torchhook.__all__)
    visible = {n for n, v in vars(torchhook).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert visible <= set(torchhook.__all__)


def test_the_front_door_holds_re_exports_and_nothing_else() -> None:
    functions = [node.name for node in FRONT_DOOR if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert set(functions) <= {"__getattr__", "__dir__"}


def test_the_names_of_the_contract_are_there() -> None:
    verbs = {"capture", "edit", "run", "layers", "ops", "load", "guard", "watch", "diff", "sweep", "clip_gradients"}
    more = {"extract", "open_features", "attention", "rollout", "cam", "report", "Inputs"}
    modules = {"edits", "transforms", "errors", "types", "plot"}
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
    assert verbs | more | modules | seeds | {"__version__"} <= set(torchhook.__all__)


def test_dir_is_all_so_that_completion_shows_nothing_else() -> None:
    assert dir(torchhook) == sorted(torchhook.__all__)


def test_the_docstring_is_a_map_of_every_public_name() -> None:
    words = set(re.findall(r"\w+", torchhook.__doc__ or ""))
    assert set(torchhook.__all__) - words == {"__version__"}
    assert 10 <= len((torchhook.__doc__ or "").splitlines()) <= 20


def test_a_function_is_not_also_a_module() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchhook.extract")
    others = [name for name in torchhook.__all__ if not isinstance(getattr(torchhook, name), ModuleType)]
    assert [name for name in others if importlib.util.find_spec(f"torchhook.{name}")] == []


def test_types_of_results_are_in_types_and_not_at_the_top() -> None:
    results = {"Recording", "Record", "Session", "Site", "Stopped"}
    assert results <= set(types.__all__)
    assert [name for name in types.__all__ if hasattr(torchhook, name)] == []


def test_errors_offers_its_classes_and_nothing_else() -> None:
    found = inspect.getmembers(errors, inspect.isclass)
    classes = {name for name, value in found if value.__module__ == errors.__name__ and not name.startswith("_")}
    assert list(errors.__all__) == sorted(classes)
    assert all(issubclass(getattr(errors, name), (errors.TorchHookError, Warning)) for name in classes)


def test_help_fits_a_few_screens() -> None:
    """Every function with its arguments and every class with what it adds, and not what it inherits: 5,294 before."""
    shown = pydoc.plain(pydoc.render_doc(torchhook))
    # Since Python 3.13, a signature that is too long for a line has one for each argument: counted as those before.
    joined = re.sub(r"\(\n(?:[ |]*[^ |)\n].*\n)+[ |]*\)", "()", shown) if sys.version_info >= (3, 13) else shown
    assert len(joined.splitlines()) <= 1100


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    """It begins with a capital or a name in backticks, and its first sentence ends."""
    wanting = []
    for name in set(torchhook.__all__) - {"__version__"}:
        value = getattr(torchhook, name)
        doc = inspect.cleandoc((vars(value).get("__doc__") if isinstance(value, type) else value.__doc__) or "")
        if not re.match(r"[A-Z`(]", doc) or not re.search(r"[.:…]$", doc.split("\n\n")[0].strip()):
            wanting.append(name)
    assert wanting == []


def test_arguments_that_are_listed_are_those_that_there_are_in_their_order() -> None:
    modules = (torchhook, torchhook.edits, torchhook.transforms, torchhook.plot, types)
    public = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    methods = {
        f"{name}.{method}": function
        for name, kind in public.items()
        if inspect.isclass(kind)
        for method, function in vars(kind).items()
        if inspect.isfunction(function)
    }
    wrong, listing = {}, 0
    for name, function in (public | methods).items():
        _, said, text = (inspect.getdoc(function) or "").partition("Args:\n")
        if said:
            listing += 1
            listed = [one for line in re.findall(r"^    (\w[\w, ]*):", text, re.MULTILINE) for one in line.split(", ")]
            there = [one for one in inspect.signature(function).parameters if one != "self"]
            if listed != there:
                wrong[name] = listed, there
    assert listing > 20
    assert wrong == {}


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


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "torchhook", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == torchhook.__version__


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
