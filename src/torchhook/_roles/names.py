"""``roles``: standard names for the places of a transformer, found by structure and proven by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchhook._core import naming
from torchhook._core.index import Index, unwrapped
from torchhook._core.select import resolve
from torchhook._recording.address import Site
from torchhook._roles import find, probe
from torchhook._roles.table import Roles
from torchhook.errors import SelectorError


def roles(model: nn.Module, inputs: Any = None, *, table: Mapping[str, str] | None = None) -> Roles:
    """Find the standard names of a model, such as ``@resid_post.3``, which are selectors from here on.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.ff = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ...     def forward(self, x):
    ...         return x + self.ff(x)
    >>> model = nn.Sequential(Block(), Block())
    >>> roles(model, torch.randn(2, 3, 4))["@mlp_out.1"]
    '1.ff'

    Each name is found by what flows where in one pass, and proven on several: sums must come out, and must go on to
    come out while the values at these very sites are changed. What cannot be proven is refused, with what was tried.

    Args:
        model: The model; it, and the process, are left as they were.
        inputs: What it is called with: a tuple of arguments, a dict of keyword arguments, ``th.Inputs`` for both, or
            the one argument. A model of transformers needs none.
        table: Names of your own and the addresses that they stand for, taken as they are. They stand beside those that
            are found, and before them; without ``inputs``, a model that is not of transformers has only these.
    """
    root = unwrapped(model) if isinstance(model, nn.Module) else Index(model).root
    own = {} if table is None else _own(root, table)
    proven = _proven(root, inputs, required=table is None)
    refused = {name: why for name, why in proven.refused.items() if name not in own}
    result = Roles({**proven.sites, **own}, refused, type(root).__name__)
    result.times = proven.times
    result.eval_only = {name: why for name, why in proven.eval_only.items() if name not in own}
    naming.remember(root, result)
    return result


def _proven(model: nn.Module, inputs: Any, required: bool) -> Roles:
    """What can be found; nothing, if no inputs are given and none can be made, and it is not ``required`` either."""
    if inputs is not None:
        return find.found(model, probe.given(inputs))
    try:
        made = probe.made_for(model)
    except SelectorError:
        if required:
            raise
        # Who names everything by hand may do so because nothing can be found.
        return Roles({}, {})
    try:
        return find.found(model, made)
    except Exception as error:
        with probe.alone(model):
            fits = probe.runs(model, made)
        if fits:
            raise  # the fault is not that of the inputs
        if not required:
            return Roles({}, {})
        raise SelectorError(
            f"standard names are found by running the model, and {type(model).__name__} did not run with inputs made "
            f"from its config ({type(error).__name__}: {str(error)[:200]}): call th.roles(model, inputs) first."
        ) from error


def _own(model: nn.Module, table: Mapping[str, str]) -> dict[str, Site]:
    """A user's own names: each must stand for one site that the model has."""
    index, own = Index(model), {}
    for name, address in table.items():
        targets = resolve(index, address)
        if len(targets) != 1 or targets[0].tensor is not None or targets[0].site.port not in ("output", "input"):
            raise SelectorError(f"table: {name!r} must stand for one output or input, found {address!r}.")
        own[name.removeprefix("@")] = targets[0].site.but(role="")
    return own


naming.register(roles)
