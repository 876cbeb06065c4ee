"""Why a site that was selected stayed silent: the likely cause, in one sentence."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch.fx
from torch import Tensor, nn

from torchhook._core.functional import Listener
from torchhook._core.gradients import GradTap
from torchhook._core.index import Index, is_script
from torchhook._core.keep import Keep
from torchhook._core.offload import is_offloaded
from torchhook._core.scope import Scope, Stop
from torchhook._core.sharding import Homes
from torchhook._core.taps import Tap
from torchhook._core.targets import Target, live_tensor
from torchhook._recording.address import MODEL, Site, parse, shown
from torchhook._recording.records import Recording
from torchhook._words import plural, times
from torchhook.edits import StepsToCome
from torchhook.errors import NeverRanWarning, RecomputeWarning, hint, suggestion, warn

_ATTENTION = "scaled_dot_product_attention"
NOT_CALLED = "the model was not called while the session was open: call it (not model.forward) inside the block."


def came(site: Site, tap: Tap, recording: Recording, seen: set[Site]) -> bool:
    """Whether a site has run; of one that names calls, those."""
    return tap.ran > 0 if site.call is None else site in (recording if site.counts_back else seen)


def takes_hooks(target: Target, index: Index) -> bool:
    """Whether a target is surely no part of TorchScript: it takes no hooks, called or not."""
    return target.tensor is None and not is_script(target.module) and not is_script(index.root)


def ended_by(error: BaseException | None, replaced: str) -> str:
    """Why nothing could come any more: what ended the block, or that the module was replaced; empty otherwise."""
    if isinstance(error, Stop):
        return "another session's stop=True ended the block."
    if replaced:
        return f"{replaced}, since the session opened. Replace it first, then open the session."
    return "" if error is None else f"the block ended early with {type(error).__name__}."


def cause(
    target: Target,
    tap: Tap,
    passing: Tap,
    index: Index,
    taps: Mapping[int, Tap],
    scope: Scope,
    listener: Listener | None,
) -> str:
    """The likely cause.

    ``passing`` is the tap that the value passes in the forward pass; ``taps`` are those of this session by module id,
    the model's own among them.
    """
    site = target.site
    if isinstance(tap, GradTap):
        return _no_gradient(target, tap, passing)
    if tap.elsewhere and not tap.ran:
        often = times(tap.elsewhere)
        return f"it ran {often} in another thread or task than the session's; threads='all' records those too."
    if site.call is not None and tap.ran:
        none = "there was no call" if isinstance(site.call, int) else "there were no calls"
        return f"it ran {tap.ran} {plural(tap.ran, 'time')}, so {none} {site.call}."
    around = _around(site.path, index)
    if any(is_script(module) for module in (target.module, *(m for _, m in around))):
        return "it is TorchScript, which takes no hooks: use the module it was made from."
    if not any(other.ran for other in taps.values()):
        return NOT_CALLED
    if scope.stopped_at is not None:
        return f"stop=True ended the forward pass at {scope.stopped_at!r}, before it."
    if site.op is not None and listener is not None:
        return _no_operation(target, index, listener)
    if around and (why := _in_attention(target, *around[0])):
        return why
    for path, module in around:
        known = taps.get(id(module))
        if known is not None and known.ran == 0:
            return f"{path!r}, which holds it, did not run either: a branch that was not taken?"
    if any(isinstance(module, torch.fx.GraphModule) for _, module in around):
        return (
            "the model is a graph of operations (torch.export, torch.fx), in which those of this layer stand without a "
            "call of the layer. torch.export.unflatten(program) has layers that are called: capture there."
        )
    where = f" in {around[0][0]!r}" if around and around[0][0] else ""
    return (
        f"the model ran without calling it{where}: a branch that was not taken, "
        "or code that uses its weights or its .forward directly."
    )


def replaced(target: Target, index: Index, followed: Mapping[Site, Tensor]) -> str:
    """What took the place of a target since the session opened; nothing, if it is still there.

    ``followed`` are the parameters whose gradients were waited for.
    """
    path = target.site.path
    if target.tensor is not None:
        known = followed.get(target.site)
        if is_offloaded(target.module):
            return ""  # a tensor without numbers stands in its place whenever its module does not run
        if known is not None and not _is_at_home(known, target.module, target.tensor, index):
            return f"{path!r} is another tensor now"
        path = path.rpartition(".")[0]
    now = index.find(path)
    return "" if now is None or now is target.module else f"{path!r} is another {type(now).__name__} now"


def _is_at_home(parameter: Tensor, module: nn.Module, name: str, index: Index) -> bool:
    if getattr(module, name, None) is parameter:
        return True
    # FSDP puts another tensor in its place while the module runs.
    home = Homes(index).of(module, name)
    return home is not None and home.parameter is parameter


def _around(path: str, index: Index) -> list[tuple[str, nn.Module]]:
    """The modules that hold the one at ``path``, innermost first."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        if (module := index.find(path)) is not None:
            found.append((path, module))
    return found


def _in_attention(target: Target, path: str, parent: nn.Module) -> str | None:
    """Parts of an attention module that it never calls; ``path`` and ``parent`` are what holds the target."""
    name = target.site.path.rpartition(".")[2]
    if isinstance(parent, nn.MultiheadAttention):
        return (
            f"nn.MultiheadAttention reads the weights of {name!r} without calling it (pytorch#78109); "
            f"capture {path or MODEL!r} instead."
        )
    # No more than likely: what a module has called is only known where operations are listened to.
    kinds = (nn.Dropout, nn.Softmax)
    if isinstance(target.module, kinds) and re.search("att(n|ention)", f"{path} {name} {type(parent).__name__}", re.I):
        return f"the model ran without calling it. {_fused(path)}"
    return None


def _fused(path: str) -> str:
    """Where to look for what a fused attention call does inside."""
    address = f"{path}/{_ATTENTION}"
    return (
        f"Fused attention has a softmax and dropout of its own: {address!r} is what it gives, {address + ':input'!r} "
        f"what it takes, and th.attention(model, inputs, sites={path or '(model)'!r}) its maps."
    )


def _no_operation(target: Target, index: Index, listener: Listener) -> str:
    site = target.site
    where = repr(site.path) if site.path else "the model itself"
    own = listener.seen.get(id(target.module))
    if own and _ATTENTION in own and site.op in ("softmax", "dropout", "matmul", "bmm", "baddbmm", "einsum"):
        return f"{where} ran no {site.op!r}. {_fused(site.path)}"
    if own and site.op is not None:
        return f"{where} ran no {site.op!r}. {suggestion(site.op, own)}"
    below = [
        f"{path}/{site.op}"
        for path, module in index.modules.items()
        if path.startswith(f"{site.path}." if site.path else "") and site.op in listener.seen.get(id(module), ())
    ]
    if below:
        return f"{where} ran no operation of its own; modules in it did: {', '.join(map(repr, below[:3]))}."
    return f"{where} ran no operation, or did not run at all."


def _no_gradient(target: Target, tap: GradTap, passing: Tap) -> str:
    if target.tensor is not None and not live_tensor(target).requires_grad:
        return "it does not require a gradient."
    if target.tensor is not None and is_offloaded(target.module):
        return (
            "it is offloaded by accelerate, which loads a copy for each call and drops it with its gradient. Load the "
            "model whole to train it, or capture the gradients of activations."
        )
    if tap.lacked_gradient:
        return "its value needs no gradient: it was computed under no_grad, or from nothing that requires one."
    if passing is not tap and not passing.ran:
        return "it did not run in the forward pass while the session was open."
    if target.site.call is not None and tap.ran:
        return f"gradients arrived for other calls, but not for call {target.site.call}."
    return "no gradient reached it: call backward inside the block, on something that depends on it."


def explain(error: BaseException, keeps: Iterable[Keep]) -> None:
    """A loss on a value that is off the graph: torch does not know who took it off."""
    detached = any(keep.mode in ("copy", "clone") for keep in keeps)
    if detached and isinstance(error, RuntimeError) and "does not require grad" in str(error):
        hint(error, "values are recorded without their graph; th.capture(…, keep='live') keeps them on it.")


def note_steps(
    recording: Recording, site: Site, left: Sequence[StepsToCome], error: BaseException | None, scope: Scope
) -> None:
    """Note the steps of a generation that edits of a site have waited for in vain."""
    for which, last in left:
        if str(site) in recording.missing:  # it was not there at any step
            return
        if error is not None and not isinstance(error, Stop):
            why = f"the block ended early with {type(error).__name__}."
        elif scope.stopped_at is not None:
            why = f"stop=True ended the forward pass at {scope.stopped_at!r}."
        elif last == 0:
            why = "an edit waits for it, and no token came after the prompt; a pass outside of generate is step 0."
        else:
            why = f"an edit waits for it, and the last step was {last}."
        recording.missing[f"{site}, {which}"] = why


def tell_of_edits(sites: list[str]) -> None:
    """Warn of edits that a backward pass after the session would not repeat."""
    if sites:
        warn(
            f"{', '.join(map(repr, sites[:4]))}: edited in a checkpointed part of the model, and the backward pass, "
            "which computes that part again, has not come. Without this session it is computed unedited, and its "
            "gradients are wrong: call backward() inside the block.",
            RecomputeWarning,
        )


def tell(recording: Recording, unnamed: Index | None = None) -> None:
    """Warn of what was replaced while a session was open, and of what never ran.

    ``unnamed`` is the index of a model of which everything was taken, since no site was named.
    """
    missing, replaced = recording.missing, recording.replaced
    named = unnamed is None or not len(recording)
    if unnamed is not None and not named:
        # A place that is kept for a layer which is not there (drop path at rate 0) is nothing to tell of.
        missing = {address: why for address, why in missing.items() if not _is_kept_free(address, unnamed)}
    if replaced and (only := [address for address in replaced if address not in missing]):
        lines = [f"  {shown(address)!r}: {replaced[address]}" for address in only[:10]]
        warn("\n".join(["replaced while the session was open:", *lines]), NeverRanWarning)
    if missing:
        warn(_told(missing, named), NeverRanWarning)


def _is_kept_free(address: str, index: Index) -> bool:
    return isinstance(index.modules.get(parse(address, index.modules).path), nn.Identity)


@functools.lru_cache(maxsize=16)  # a session that is opened again and again says the same at each end
def not_called(sites: tuple[Site, ...]) -> tuple[Mapping[str, str], str]:
    """What is noted, and what is said, of sites where nothing was called at all."""
    missing = {str(site): NOT_CALLED for site in sites}
    return missing, _told(missing)


def _told(missing: Mapping[str, str], named: bool = True) -> str:
    """What is said of sites that never ran, whether they were ``named`` or are all that there are."""
    number = len(missing)
    lines = [f"  {address or MODEL!r}: {why}" for address, why in islice(missing.items(), 10)]
    more = [f"  … and {number - 10} more: see rec.missing"] if number > 10 else []
    what = (
        f"selected {plural(number, 'site')}" if named else f"{plural(number, 'module')} of all, since none was named,"
    )
    return "\n".join([f"{number} {what} never ran:", *lines, *more])
