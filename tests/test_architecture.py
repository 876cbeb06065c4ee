"""The walls between the rooms, read off the sources: who may enter where, and who may know what."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

import pytest

from tests.sources import (
    FILES,
    ROOT,
    TREES,
    branches,
    comments_and_code,
    defined,
    gathered,
    imported,
    mentioned,
    own_names,
    packages,
    private,
    private_attributes,
    private_paths,
    relative,
    unexplained,
    users_of,
)


def test_imports_are_absolute_so_that_they_can_be_read_here() -> None:
    def steps(tree: ast.AST, file: str) -> Iterator[str]:
        yield from (str(node.lineno) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)

    assert gathered(steps) == {}


def test_every_file_says_what_it_is_for() -> None:
    docs = {file: ast.get_docstring(tree) or "" for file, tree in TREES.items()}
    assert [file for file, doc in docs.items() if not (doc[:1].isupper() or doc[:1] == "`")] == []


# -- rooms ---------------------------------------------------------------------------------------------------------

ROOMS = {path.parent.name for path in ROOT.glob("*/api.py")}


def test_a_room_with_an_api_is_entered_through_it() -> None:
    def entering(tree: ast.AST, file: str) -> Iterator[str]:
        for name in imported(tree):
            package, room, door, *_ = [*name.split("."), "", ""]
            if package == "torchhook" and room in ROOMS and room != file.split("/")[0] and door != "api":
                yield f"{room}.{door}"

    assert {"_guard", "_watch", "_cam", "_report", "_cli", "_features", "_extract", "_classic"} <= ROOMS
    assert gathered(entering) == {}


def layers_of(container: str) -> dict[str, int]:
    """How high each module of a package stands, by the contract that ``lint-imports`` checks."""
    text = (ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (lines,) = re.findall(rf'containers = \["{re.escape(container)}"\]\nlayers = \[(.*?)\n\]', text, re.DOTALL)
    layers = [re.findall(r"\w+", line) for line in lines.splitlines() if line.strip()]
    return {name: height for height, names in enumerate(reversed(layers)) for name in names}


@pytest.mark.parametrize(("head", "container", "left_out"), [
    ("| file | what it knows |", "torchhook._core", set()),
    ("| room | what is in it |", "torchhook", {"__main__", "_version"}),
])  # fmt: skip
def test_the_map_of_the_house_has_everything_in_import_order(head: str, container: str, left_out: set[str]) -> None:
    page = (ROOT / "_core" / "README.md").read_text(encoding="utf-8")
    rows = itertools.takewhile(lambda line: line.startswith("|"), page.partition(head)[2].strip().splitlines())
    listed = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows]
    known = layers_of(container)
    assert {name for names in listed for name in names} == known.keys() - left_out
    heights = [[known[name] for name in names] for names in listed if names]
    assert all(max(one) <= min(other) for one, other in itertools.pairwise(heights))


# -- torch ---------------------------------------------------------------------------------------------------------

# Every subclass of nn.Module meets these three; there is no public way to see a module's own, None among them.
OF_MODULES = {"._buffers", "._modules", "._parameters"}


def test_private_names_of_torch_are_in_one_room() -> None:
    own = own_names()

    def reached(tree: ast.AST, file: str) -> Iterator[str]:
        if not file.startswith("_torch/"):
            yield from private_paths(tree)
            yield from (name for name in private_attributes(tree, own) if name not in OF_MODULES)

    assert gathered(reached) == {
        # What a named tuple has by itself is not torch's.
        "_recording/value_codecs.py": {"torch.nn.utils.rnn.PackedSequence._make"},
        # Of transformers, which has no public name for it.
        "_core/naming.py": {"._attn_implementation"},
    }


def test_frames_are_looked_at_there_and_where_errors_point() -> None:
    wanted = {"_getframe", "currentframe", "stack", "getouterframes", "walk_stack", "extract_stack", "_current_frames"}

    def looking(tree: ast.AST, file: str) -> Iterator[str]:
        used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for module, _, name in (path.rpartition(".") for path in [*used, *imported(tree)]):
            looked = module in ("sys", "inspect", "traceback") and name in wanted
            if looked and not file.startswith("_torch/") and file != "errors.py":
                yield f"{module}.{name}"

    assert gathered(looking) == {}


# -- size ----------------------------------------------------------------------------------------------------------


def test_no_file_has_more_than_400_lines() -> None:
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {file: count for file, count in lines.items() if count > 400} == {}


def test_no_function_has_more_than_20_branches() -> None:
    def many(tree: ast.AST, file: str) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and branches(node) > 20:
                yield node.name

    assert gathered(many) == {}


def test_there_are_at_least_4_comments_for_100_lines_of_code() -> None:
    counts = [comments_and_code(path.read_text(encoding="utf-8")) for path in FILES]
    assert 100 * sum(comments for comments, _ in counts) / sum(code for _, code in counts) >= 4


def test_nothing_stands_about_unused() -> None:
    known = {file: mentioned(tree) for file, tree in TREES.items()}
    anywhere = set().union(*known.values())

    def unused(tree: ast.AST, file: str) -> Iterator[str]:
        # A private name is of use in its own file, or nowhere.
        yield from (name for name in defined(tree) if name not in (known[file] if private(name) else anywhere))

    assert {file: names for file, names in gathered(unused).items() if names - {"__all__"}} == {}


def test_what_swallows_any_error_says_why_anything_may_come_there() -> None:
    """As a user's own code does. What is not expected is a fault of ours, and must be heard of."""
    found = {relative(path): list(unexplained(path.read_text(encoding="utf-8"))) for path in FILES}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert list(unexplained("try:\n    f()\nexcept Exception:\n    pass\n")) == [3]
    assert list(unexplained("with contextlib.suppress(ValueError, Exception):\n    f()\n")) == [1]
    assert list(unexplained("try:\n    f()\nexcept Exception:  # theirs\n    pass\n")) == []


# -- who may know what ------------------------------------------------------------------------------------------------


def test_only_hooks_registers_hooks() -> None:
    def calling(tree: ast.AST, file: str) -> Iterator[str]:
        names = [
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        yield from (name for name in names if name.startswith("register_") and name != "register_pytree_node")

    assert set(gathered(calling)) == {"_core/hooks.py", "_torch/hooks.py"}


def test_only_keep_knows_copy_on_write() -> None:
    assert users_of(r"lazy_clone|_is_cow|_data_address") == {"_core/keep.py", "_torch/__init__.py", "_torch/memory.py"}


def test_only_nodes_knows_the_pytree() -> None:
    """What opens values does; ``torch.export`` has to be told of the one class of ours that it returns."""
    room = {"_torch/__init__.py", "_torch/values.py"}
    assert users_of(r"pytree_nodes|SUPPORTED_NODES|tree_flatten|tree_map") == {"_values/nodes.py", *room}
    assert users_of(r"register_pytree_node") == {"_classic/feature_list.py", *room}


def test_nothing_replaces_forward_or_wraps_torch() -> None:
    def replaced(tree: ast.AST, file: str) -> Iterator[str]:
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Attribute) and (
                    target.attr in ("forward", "__call__") or ast.unparse(target.value).split(".")[0] == "torch"
                ):
                    yield f"{ast.unparse(target)}:{node.lineno}"

    assert gathered(replaced) == {}


@pytest.mark.parametrize("package", ["torchlens", "nnsight", "captum"])
def test_the_library_never_imports(package: str) -> None:
    assert [file for file, tree in TREES.items() if package in packages(tree)] == []


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("matplotlib", r"plot/"),
        ("jinja2", r"_report/"),
        ("ray", r"_extract/(ray|request)\.py"),
        ("typer", r"_cli/"),
        ("transformers", r"demo\.py"),
    ],
)
def test_a_package_is_known_to_its_own_room_only(package: str, rooms: str) -> None:
    using = [file for file, tree in TREES.items() if package in packages(tree)]
    assert using
    assert [file for file in using if not re.match(rooms, file)] == []


def test_no_file_is_read_by_pickle() -> None:
    reading = ("_recording/records.py", "_recording/saving.py", "_recording/tensor_file.py")
    assert [file for file in reading if packages(TREES[file]) & {"pickle", "dill", "shelve"}] == []
    assert [file for file in reading if "torch.load" in ast.unparse(TREES[file])] == []
