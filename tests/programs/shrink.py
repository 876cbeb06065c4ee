"""Make a program that shows something wrong short: leave out steps, put arguments in the place of calls."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

Path = tuple[tuple[str, int | None], ...]
"""From the root of a syntax tree to a node: fields, and places in those that are lists."""


def shrink(source: str, is_wrong: Callable[[str], bool]) -> str:
    """The shortest program that is found by leaving out, one thing at a time, and that is still wrong."""
    best, before = ast.unparse(ast.parse(source)), ""
    while best != before:
        before = best
        for change in (_without_step, _renamed, _simpler):
            best = _passed(best, change, is_wrong)
    return best


def _passed(best: str, change: Callable[[ast.Module], Iterator[ast.Module]], is_wrong: Callable[[str], bool]) -> str:
    """One pass from the end to the beginning: what is left out late does not move what comes before."""
    place = 0
    while True:
        candidates = [ast.unparse(other) for other in change(ast.parse(best))][::-1]
        if place >= len(candidates):
            return best
        shorter = candidates[place]
        if len(shorter) < len(best) and is_wrong(shorter):
            best = shorter
        else:
            place += 1


def _without_step(tree: ast.Module) -> Iterator[ast.Module]:
    """Without one statement: a whole class, a step, an attribute."""
    for path, node in _nodes(tree):
        for name in ("body", "orelse"):
            for i, _ in enumerate(_statements(node, name)):
                other = copy.deepcopy(tree)
                body = getattr(_at(other, path), name)
                del body[i]
                if not body:
                    body.append(ast.Pass())
                yield other


def _renamed(tree: ast.Module) -> Iterator[ast.Module]:
    """Without ``a = …b…``, and with ``b`` in the place of ``a`` from there on."""
    for path, node in _nodes(tree):
        for i, step in enumerate(_statements(node, "body")):
            if not isinstance(step, ast.Assign) or not isinstance(step.targets[0], ast.Name):
                continue
            gone = step.targets[0].id
            for kept in sorted({n.id for n in ast.walk(step.value) if isinstance(n, ast.Name)} - {"self", gone}):
                other = copy.deepcopy(tree)
                body = _at(other, path).body
                del body[i]
                for name in [n for later in body[i:] for n in ast.walk(later) if isinstance(n, ast.Name)]:
                    name.id = kept if name.id == gone else name.id
                if body:
                    yield other


def _simpler(tree: ast.Module) -> Iterator[ast.Module]:
    """With a part of an expression in the place of the whole of it."""
    for path, node in _nodes(tree):
        for part in _parts(node):
            other = copy.deepcopy(tree)
            *above, (name, i) = path
            parent = _at(other, tuple(above))
            if i is None:
                setattr(parent, name, copy.deepcopy(part))
            else:
                getattr(parent, name)[i] = copy.deepcopy(part)
            yield other


def _parts(node: ast.AST) -> list[ast.expr]:
    """What may stand in the place of an expression."""
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "frozen":
            return []  # the judge needs it
        if called == "checkpoint":
            return [ast.Call(node.args[0], node.args[1:], [])]
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [
            p for p in [*node.args, *owner] if not (isinstance(p, ast.Name) and p.id in ("self", "F", "nn", "torch"))
        ]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, (ast.Tuple, ast.List)):
        rests = (
            [type(node)([e for e in node.elts if e is not one], node.ctx) for one in node.elts]
            if len(node.elts) > 1
            else []
        )
        return [*node.elts, *rests]
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.Dict):
        return list(node.values)
    return []


# -- syntax trees -------------------------------------------------------------------------------------------------


def _statements(node: ast.AST, name: str) -> list[ast.stmt]:
    found = getattr(node, name, None)
    return found if isinstance(found, list) else []


def _nodes(node: ast.AST, path: Path = ()) -> Iterator[tuple[Path, ast.AST]]:
    yield path, node
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield from _nodes(value, (*path, (name, None)))
        elif isinstance(value, list):
            for i, part in enumerate(value):
                if isinstance(part, ast.AST):
                    yield from _nodes(part, (*path, (name, i)))


def _at(tree: ast.AST, path: Path) -> ast.AST:
    for name, i in path:
        tree = getattr(tree, name) if i is None else getattr(tree, name)[i]
    return tree
