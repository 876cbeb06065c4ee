"""Reading the sources: what the walls of the architecture are tested with sees what it should."""

from __future__ import annotations

import ast

import pytest

from tests.sources import branches, comments_and_code, private_attributes, private_paths


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._lazy_clone(x)", {"torch._lazy_clone"}),
        ("import torch as t\nt._C._nn.gelu(x)", {"torch._C._nn.gelu"}),
        ("from torch import nn\nnn.modules.conv._ConvNd", {"torch.nn.modules.conv._ConvNd"}),
        ("from torch.utils import _pytree as p\np.tree_map", {"torch.utils._pytree.tree_map"}),
        ("import torch\ngetattr(getattr(torch, '_C', 0), '_x', 0)", {"torch._C._x"}),
        ("import sys\n'torch._dynamo' in sys.modules", {"torch._dynamo"}),
        ("import torch\ntorch.__version__; torch.nn.Module.__call__", set()),
        ("from mine import torch\ntorch._private", set()),
        ('"""Prose about torch._lazy_clone."""', set()),
        ('warn("set torch._dynamo.config.x")', {"torch._dynamo.config.x"}),
    ],
)
def test_paths_into_torch_are_found_however_they_are_written(source: str, found: set[str]) -> None:
    assert private_paths(ast.parse(source)) == found


def test_attributes_are_torchs_when_nothing_here_defines_them() -> None:
    source = "t._version, self._version, t._mine, getattr(t, '_base'), t._version_of, pair._replace(), t.__dict__"
    assert set(private_attributes(ast.parse(source), {"_version", "_mine"})) == {"._version", "._base", "._version_of"}


def test_branches_are_counted_as_said() -> None:
    source = """
def f(x, y):
    if x and y or not x:           # if, and, or: 3
        return [a for a in x if a]  # 1
    elif x:                        # 1
        assert y                   # 1
    for _ in x:                    # 1
        def g():
            while y:               # g's
                pass
    try:
        return lambda: 1 if x else 2  # 1
    except ValueError:             # 1
        pass
    finally:
        pass
    match x:
        case 1:                    # 1
            pass
        case _:                    # 1
            pass
"""
    assert branches(ast.parse(source).body[0]) == 11


def test_comments_are_counted_as_said() -> None:
    source = (
        '"""Doc\n\nstring."""\n\n# one\nx = 1  # two\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""  # noqa: X\n'
    )
    assert comments_and_code(source) == (2, 4)
