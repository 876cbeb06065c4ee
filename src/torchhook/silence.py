"""Why a site that was selected stayed silent: the likely cause, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from torchhook.errors import suggestion
from torchhook.hooks import GradTap, Scope, Tap
from torchhook.ops import Listener
from torchhook.select import Index, Target


def cause(
    target: Target, tap: Tap, index: Index, taps: Mapping[nn.Module, Tap], scope: Scope, listener: Listener | None
) -> str:
    """The likely cause. ``taps`` are those of this session by module, the model's own among them."""
    site, module = target.site, target.module
    if isinstance(tap, GradTap):
        return _no_gradient(target, tap, taps)
    if tap.elsewhere and not tap.ran:
        times = "once" if tap.elsewhere == 1 else f"{tap.elsewhere} times"
        return f"it ran {times} in another thread or task than the session's; threads='all' records those too."
    if site.call is not None and tap.ran:
        return f"it ran {tap.ran} time{'s' * (tap.ran != 1)}, so there was no call {site.call}."
    if not any(other.ran for other in taps.values()):
        if any(isinstance(m, torch.jit.ScriptModule) for m in index.modules.values()):
            return (
                "nothing ran that hooks can see: inside a TorchScript module they never fire. Use the original module."
            )
        return "nothing ran while the session was open: call the model itself (not model.forward) inside the block."
    if scope.stopped_at is not None:
        return f"stop=True ended the forward pass at {scope.stopped_at!r}, before it."
    if site.op is not None and listener is not None and module in listener.seen:
        where = repr(site.path) if site.path else "the model itself"
        return f"{where} ran no {site.op!r}. {suggestion(site.op, listener.seen[module])}"
    parents = _ancestors(site.path, index)
    for path, parent in parents:
        for kind, why in _BYPASSES.items():
            if isinstance(parent, kind):
                return why(site.path, path)
    if "_orig_mod" in vars(module).get("_modules", {}):
        return "it was compiled before the hook was there."
    for path, parent in parents:
        known = taps.get(parent)
        if known is not None and known.ran == 0:
            return f"{path!r}, which holds it, did not run either: a branch that was not taken?"
    where = f" in {parents[0][0]!r}" if parents and parents[0][0] else ""
    return (
        f"the model ran without calling it{where}: a branch that was not taken, "
        "or code that uses its weights or its .forward directly."
    )


def _no_gradient(target: Target, tap: GradTap, taps: Mapping[nn.Module, Tap]) -> str:
    if target.tensor is not None:
        return "no gradient of it was computed: call backward inside the block, on something that depends on it."
    if tap.without_grad:
        return "its value needs no gradient: it was computed under no_grad, or from nothing that requires one."
    passing = taps.get(target.module)
    if passing is not None and not passing.ran and target.site.op is None:
        return "its module did not run while the session was open."
    return "no gradient reached it: call backward inside the block, on something that depends on it."


def _ancestors(path: str, index: Index) -> list[tuple[str, nn.Module]]:
    """The modules around ``path``, innermost first."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        if path in index.modules:
            found.append((path, index.modules[path]))
    return found


def _attention(path: str, parent: str) -> str:
    return (
        f"nn.MultiheadAttention reads the weights of {path.rpartition('.')[2]!r} without calling it (pytorch#78109); "
        f"capture {parent!r} instead."
    )


def _encoder_layer(path: str, parent: str) -> str:
    return (
        f"nn.TransformerEncoderLayer {parent!r} took its fused path, which calls none of its children; "
        "torch.backends.mha.set_fastpath_enabled(False) turns that off."
    )


def _script(path: str, parent: str) -> str:
    return f"hooks never fire inside the TorchScript module {parent or 'model'!r}; use the original module."


_BYPASSES: dict[type[nn.Module], Callable[[str, str], str]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    torch.jit.ScriptModule: _script,
}
