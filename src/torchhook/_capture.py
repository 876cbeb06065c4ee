"""``capture``, ``edit`` and ``run``: keep or change what passes in a model, for a block or for one call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchhook._core import calling, per_site
from torchhook._core.index import Index, unwrapped
from torchhook._core.keep import Keep
from torchhook._core.per_site import Transforms
from torchhook._core.ranks import Together
from torchhook._core.scope import Stopped as Stopped
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session, Threads
from torchhook._core.targets import Target
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.subclasses import full, sharded_over
from torchhook.edits.adapting import no_dict
from torchhook.errors import SelectorError, hint
from torchhook.transforms import compose

Edits = Mapping[Any, Any]
Gather = Literal["local", "full"]


def capture(
    model: nn.Module,
    *selectors: Selector,
    exclude: Selector | None = None,
    port: str = "output",
    keep: str = "copy",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    transform: Transforms = None,
    max_records: int | None = None,
    stop: bool = False,
    edit: Edits | None = None,
    before_edits: bool = False,
    threads: Threads = "own",
    gather: Gather = "local",
) -> Session:
    """Record what passes the selected sites while the block runs; without selectors, every module's output.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    >>> with capture(model, "0", "1:input") as rec:
    ...     output = model(torch.ones(2, 3))
    >>> rec["0"].shape
    torch.Size([2, 4])

    The session may be opened again, each time with a recording of its own. With ``stop=True`` a pass that has seen
    every site ends the block, and a loop in it; ``session.run`` ends that pass alone.

    >>> session = capture(model, "0", stop=True)
    >>> with session as rec:
    ...     passes = [session.run(batch) for batch in torch.ones(2, 5, 3)]

    Args:
        model: The model; it computes what it would without a recording, ``edit`` aside.
        selectors: What to keep: an address (``"layer4"``, ``"fc:input"``, ``"relu#1"``, ``"block/softmax"``,
            ``"(model)"``), a glob, a module type, a module, a function of name and module, or a list of these.
        exclude: Sites to leave out of those selected.
        port: What is meant where an address does not say: ``"output"``, ``"input"``, ``"grad"``, ``"grad_input"`` or
            ``"grad_total"``.
        keep: ``"copy"`` is detached and safe from in-place layers; ``"clone"`` too, and its memory is never shared;
            ``"live"`` is safe and still on the autograd graph; ``"reference"`` is the bare tensor.
        device: Where values are kept; by default where they are. ``"cpu"`` copies from the GPU without making the model
            wait, nor the next call of it. Reading a value does wait: in a loop, for as little as can be where each
            recording is read after the next call.
        dtype: Floating-point tensors are cast to this; by default they stay as they are.
        transform: Changes what is kept, not what the model computes: one of ``transforms``, or any function of a value.
            Or a mapping from selectors to these: of two that mean a site its own address counts, and what none means
            is kept whole.
        max_records: How many records of each site to keep, the newest; by default all.
        stop: Whether to leave the block, or the pass that ``session.run`` calls, when every site has been seen.
        edit: Changes values on their way, as ``th.edit`` does.
        before_edits: Whether to keep values as they are before the edits; by default as they are after them.
        threads: ``"all"`` also records calls from other threads than the one that opens it.
        gather: Where several ranks share the work: ``"local"`` keeps what this rank has (of a parameter's gradient
            under DDP, that of its own batch; under FSDP, its part), ``"full"`` keeps all of a DTensor, and the gradient
            of the whole parameter over all ranks, which then have to capture too.
    """
    session = Session(model, threads=threads)
    session.takes_all = not selectors
    if gather not in ("local", "full"):
        raise ValueError(f"gather={gather!r}: use 'local' (what this rank has) or 'full' (all of it, on every rank).")

    def choose(index: Index) -> _Chosen:
        # Not "**": a glob never means the model itself.
        targets = resolve(index, selectors or _every_module, exclude=exclude, port=port)
        changes = _resolved(index, edit) if edit else []
        changed, together = None, None
        if transform is not None or gather == "full":
            own = per_site.by_target(transform, index, targets, port)
            if gather == "full":
                together = Together(f"captured {zlib.crc32(' '.join(target.site for target in targets).encode())}")
                whole = _Gathered(together)
                made = {id(one): whole if one is None else compose(whole, one) for one in own}
                own = [made[id(one)] for one in own]
            changed = per_site.chosen(targets, own)
        return targets, changes, Keep(keep, device=device, dtype=dtype, transform=changed), together

    def build(session: Session, chosen: _Chosen) -> None:
        targets, changes, keeper, session.gathers = chosen
        for target, change in changes:
            session.edit(target, change)
        session.record(targets, keeper, max_records, before_edits)
        # Last: the pass ends in the look that this adds, so that what it ends at must have been kept by then.
        if stop:
            session.stop_when_seen(targets)

    session.prepare(choose, build)
    return session.handed_out("what th.capture(…) returned")


_Chosen = tuple[Sequence[Target], list[tuple[Target, Any]], Keep, Together | None]
"""What the arguments of ``capture`` come to, of the modules that are there: what is kept, what is changed before, how
it is kept, and who waits for the other ranks. A bare tuple: one is made for each session."""


class _Gathered:
    """A transform that puts the parts of all ranks together."""

    moves_dims = False

    def __init__(self, together: Together) -> None:
        self.together = together

    def __call__(self, value: Any) -> Any:
        return tree.map_tensors(self._whole, value)

    def _whole(self, tensor: Tensor) -> Tensor:
        self.together.need(sharded_over(tensor), f"a DTensor of shape {tuple(tensor.shape)}")
        return full(tensor)


def _every_module(name: str, module: nn.Module) -> bool:
    return True


def edit(model: nn.Module, edits: Edits, *, threads: Threads = "own") -> Session:
    """Change what flows through the model while the block runs.

    >>> from torchhook import edits
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with edit(model, {"0": edits.zero()}):
    ...     model(torch.ones(1, 3))
    tensor([[0., 0., 0., 0.]])

    ``edits`` maps selectors to one edit or a list of them, applied in order; sessions nest, and the outer one's edits
    come first.
    """
    session = Session(model, threads=threads)

    def build(session: Session, changes: list[tuple[Target, Any]]) -> None:
        for target, change in changes:
            session.edit(target, change)

    session.prepare(lambda index: _resolved(index, edits), build)
    return session.handed_out("what th.edit(…) returned")


def _resolved(index: Index, edits: Edits) -> list[tuple[Target, Any]]:
    if not isinstance(edits, Mapping):
        raise no_dict(edits, "selectors")
    return [(target, change) for selector, change in edits.items() for target in resolve(index, selector)]


def run(
    model: nn.Module,
    *args: Any,
    capture: Selector | None = None,
    edit: Edits | None = None,
    before_edits: bool = False,
    exclude: Selector | None = None,
    port: str = "output",
    keep: str = "copy",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    transform: Transforms = None,
    stop: bool = False,
    kwargs: dict[str, Any] | None = None,
    **model_kwargs: Any,
) -> tuple[Any, Recording]:
    """Call the model once and return its output and the recording: of what ``capture`` selects, or of every module.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> output, rec = run(model, torch.ones(2, 3), capture="0")

    With ``edit`` alone, nothing is recorded. With ``stop=True`` the forward pass ends at the last site, and the output
    is a ``Stopped``.

    Args:
        model: The model.
        args: What it is called with.
        capture: What to record, by any selector.
        edit: Edits by selector, as ``th.edit`` takes them.
        before_edits: As in ``th.capture``.
        exclude: As in ``th.capture``.
        port: As in ``th.capture``.
        keep: As in ``th.capture``.
        device: As in ``th.capture``.
        dtype: As in ``th.capture``.
        transform: As in ``th.capture``.
        stop: As in ``th.capture``.
        kwargs: Keyword arguments of the model whose names are taken here.
        model_kwargs: All its others.
    """
    _refuse_meant_for_run(model, model_kwargs)
    if capture is None and edit is not None:
        if stop:
            raise ValueError("stop=True ends the forward pass at the last captured site: say capture= too.")
        session = _edit(model, edit)
    else:
        session = _capture(
            model,
            *([] if capture is None else [capture]),
            exclude=exclude,
            port=port,
            keep=keep,
            device=device,
            dtype=dtype,
            transform=transform,
            stop=stop,
            edit=edit,
            before_edits=before_edits,
        )
    try:
        return session.run(*args, **{**(kwargs or {}), **model_kwargs})
    except Exception as error:
        if len(args) == 1 and isinstance(args[0], Mapping) and _names_parameters(model, args[0]):
            hint(error, "th.run calls the model as Python does: a dict of keyword arguments is th.run(model, **batch).")
        elif args and isinstance(args[0], str) and _selects(model, args[0]):
            hint(error, f"th.run calls the model as Python does: sites are named by capture={args[0]!r}.")
        raise


def _selects(model: nn.Module, given: str) -> bool:
    """Whether a text that was given to a model chooses sites of it."""
    try:
        return bool(resolve(model, given))
    except SelectorError:
        return False


def _names_parameters(model: nn.Module, given: Mapping[Any, Any]) -> bool:
    """Whether a dict has names that the model's forward takes as keywords."""
    return any(name in calling.parameter_names(unwrapped(model)) for name in given)


# Arguments of ``run`` have the names of these two.
_capture, _edit = capture, edit


def _refuse_meant_for_run(model: nn.Module, given: dict[str, Any]) -> None:
    """A keyword that is nearly one of ours would be swallowed by a model that takes any, and do nothing."""
    for name in given:
        if name in _MEANT and name not in calling.parameter_names(unwrapped(model)):
            raise TypeError(
                f"th.run has no {name}=, and the model's forward names none: write {_MEANT[name]}. If the model is to "
                f"get it, among any keywords that it takes: kwargs={{{name!r}: …}}."
            )


_MEANT = {
    **dict.fromkeys(("captures", "sites", "selectors"), "capture=…"),
    "edits": "edit={site: edit}",
    "transforms": "transform=…",
    **{name: f"th.capture(model, …, {name}=…).run(…)" for name in ("gather", "max_records", "threads")},
}
