"""A program as a script that stands alone: what the judge needed in it is gone, and what is wrong stands below it."""

from __future__ import annotations

import ast

from tests.programs.judge import Wrong
from tests.programs.stage import SEED

HEAD = f"""\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torchhook as th
from torchhook import edits

torch.set_default_dtype(torch.float64)
torch.manual_seed({SEED})
"""
CAPTURE = """\
model, args = Program().eval(), inputs()
sites = [f"{name}:{port}" for name, _ in model.named_modules() for port in ("grad", "grad_input", "grad_total")]
with th.capture(model, *sites) as rec:
    output = model(*args)
    sum((t * t.detach().cos()).sum() for t in tree_leaves(output) if isinstance(t, torch.Tensor)).backward()
print(rec)
"""


def script(source: str, wrong: list[Wrong]) -> str:
    """The program in plain torch, and what was found."""
    tree = ast.fix_missing_locations(Plain().visit(ast.parse(source)))
    lines = [f"# {found.kind} at {found.site}: {found.text}" for found in wrong[:6]]
    return "\n\n".join([HEAD, ast.unparse(tree) + "\n", CAPTURE + "\n".join(lines)]) + "\n"


class Plain(ast.NodeTransformer):
    """Puts torch's own names in the place of those that the judge has given a second meaning."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "frozen":
            return node.args[0]
        if name == "detach":
            return ast.Call(ast.Attribute(node.args[0], "detach", ast.Load()), [], [])
        if name == "no_grad":
            return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), "no_grad", ast.Load()), [], [])
        return node
