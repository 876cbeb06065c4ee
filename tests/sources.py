"""The sources, read as text and as trees: what a file imports, what of torch's it reaches into, how long it is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

import torchhook

ROOT = Path(torchhook.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


TREES = {relative(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
Found = dict[str, set[str]]
"""What was found, by file."""


def gathered(find: Callable[[ast.AST, str], Iterable[str]]) -> Found:
    """What ``find(tree, file)`` yields for each file; files without are left out."""
    found = {file: set(find(tree, file)) for file, tree in TREES.items()}
    return {file: names for file, names in found.items() if names}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name that a file imports, anywhere in it, with its module; also by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif called(node) in ("require", "import_module"):
            yield from strings(node.args[:1])


def called(node: ast.AST) -> str:
    """The name of the function that is called, without what it is an attribute of."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def strings(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def packages(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported(tree)}


def users_of(pattern: str) -> set[str]:
    """The files whose code, comments and docstrings aside, has the pattern in a name."""

    def names(tree: ast.AST, file: str) -> Iterator[str]:
        for node in ast.walk(tree):
            name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}.get(type(node))
            if name is not None:
                yield getattr(node, name)
            elif called(node) == "getattr":
                yield from strings(node.args)

    return {file for file, found in gathered(names).items() if any(re.search(pattern, name) for name in found)}


# -- torch's private names --------------------------------------------------------------------------------

LOOKING_UP = ("getattr", "hasattr", "setattr", "delattr")
NOT_TORCHS = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_formatting"}
"""A named tuple's public names; frames, which have a wall of their own; Hugging Face's old name of a format."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def bound(tree: ast.AST) -> dict[str, str]:
    """What the names that are imported from torch stand for: ``{"F": "torch.nn.functional"}``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: path for name, path in names.items() if path.split(".")[0] == "torch"}


def step(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The owner and the name of an attribute, written with a dot or looked up by a string."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if called(node) in LOOKING_UP and strings(node.args[1:2]):
        return node.args[0], node.args[1].value
    return None


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The path of an expression that begins at torch, or nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    found = step(node)
    before = dotted(found[0], names) if found else ""
    return f"{before}.{found[1]}" if found and before else ""


def private_paths(tree: ast.AST) -> set[str]:
    """The private paths into torch that a file has: imports, attributes, and strings that spell one."""
    names, nodes = bound(tree), list(ast.walk(tree))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings: nobody acts by them
    strings = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose]
    spelled = [node.value for node in strings if isinstance(node.value, str)]
    spelled = [path for text in spelled for path in re.findall(r"\btorch(?:\.\w+)+", text)]  # also in what is said
    paths = {*imported(tree), *(dotted(node, names) for node in nodes), *spelled}
    inside = {path for path in paths if re.fullmatch(r"torch(\.\w+)+", path) and any(map(private, path.split(".")))}
    return {path for path in inside if not any(other.startswith(f"{path}.") for other in inside)}


def own_names() -> set[str]:
    """Every name that the library itself gives to something."""
    found = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_attributes(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of objects that are not ours: ``._version`` for ``tensor._version``.

    No type is known here. A name that nothing in the library defines is somebody else's, and so is one that tensors and
    modules have too, unless it is asked of ``self``.
    """
    names = bound(tree)
    torchs = {*dir(torch.Tensor), *dir(nn.Module()), *dir(torch.UntypedStorage)}
    for owner, name in filter(None, map(step, ast.walk(tree))):
        ours = name in own and (name not in torchs or ast.unparse(owner) in ("self", "cls"))
        if private(name) and name not in NOT_TORCHS and not ours and not dotted(owner, names):
            yield f".{name}"


# -- what nobody uses -------------------------------------------------------------------------------------------


def mentioned(tree: ast.AST) -> set[str]:
    """Every name that a file loads, imports, or has in a string, as ``__all__`` and annotations do."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.alias)):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.name.rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"[A-Za-z_]\w*", node.value))
    return found


def defined(tree: ast.Module) -> Iterator[str]:
    """What stands in a file by itself: functions, classes, constants. A decorator may have a use for what it gets."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list:
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


# -- errors -------------------------------------------------------------------------------------------------

ANYTHING = {"Exception", "BaseException"}


def unexplained(text: str) -> Iterator[int]:
    """The lines that swallow whatever is raised, and have no comment that says why anything may come there.

    The comment stands behind the line, before it, or in the handler. A handler that always raises swallows nothing.
    """
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(ast.parse(text)):
        first, last = 0, 0
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            caught = {getattr(one, "id", "") for one in ast.walk(node.type)} if node.type else ANYTHING
            first, last = (node.lineno, node.end_lineno or 0) if caught & ANYTHING else (0, 0)
        elif called(node) == "suppress" and ANYTHING & {getattr(one, "id", "") for one in node.args}:
            first = last = node.lineno
        if first and not comments & set(range(first - 1, last + 1)):
            yield first


# -- size ----------------------------------------------------------------------------------------------------


def within(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function; what it defines inside counts for itself, its lambdas count here."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
            yield from within(node)


def branches(function: ast.AST) -> int:
    """One for each if and elif, for, while, except, assert, case and ternary, each further operand of an ``and`` or
    ``or``, and each ``if`` of a comprehension. Not counted: else, finally, with, and a comprehension's ``for``."""
    counted = 0
    for node in within(function):
        one = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case, ast.IfExp)
        counted += isinstance(node, one)
        counted += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        counted += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return counted


BLANK = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def comments_and_code(text: str) -> tuple[int, int]:
    """The comments, and the lines that have code: blank lines, comment lines and docstrings aside.

    A comment is one line or the end of one; those that speak to a tool (``noqa``, ``type: ignore``) do not count.
    """
    comments, code = 0, set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.COMMENT:
            comments += not re.match(r"#\s*(noqa|type:|pragma|fmt:|mypy:|ruff:)", token.string)
        elif not docstring and token.type not in BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return comments, len(code)
