"""Edits of steps in a generation without a cache: a call is given the tokens of earlier steps again, and each of them
is edited as it was in its own, as the keys and values in a cache are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchhook._recording import steps as passes
from torchhook._recording.address import Site
from torchhook._recording.steps import Pass
from torchhook._values import parts, tree
from torchhook._values.call_sizes import Sizes
from torchhook._values.choices import Along
from torchhook._values.heads import KnownHeads, NoPart
from torchhook._values.parts import Part
from torchhook.edits.adapting import Steps, changes_call
from torchhook.edits.changing import check
from torchhook.edits.protocol import Edit
from torchhook.errors import EditError

_WAY = "Generate with a cache (use_cache=True)"


def steps_of(call: Pass, site: Site) -> list[Pass]:
    """The steps whose tokens a call is given."""
    if found := list(call.by_step()):
        return found
    raise EditError(
        f"{site.shown}: edits.only(…, steps=…): this call of step {call.step} is given earlier tokens again, and which "
        f"of its {call.tokens} tokens are new cannot be told: there are no more than in the call before. {_WAY}, or "
        "choose the tokens of each call alone: positions=-1 without steps=."
    )


def refuse_rows_of_beams(call: Pass, rows: object, site: Site) -> None:
    """Say that the rows of beams are not the same ones in every step: what is in a cache moves with them."""
    if call.beams and rows is not None:
        raise EditError(
            f"{site.shown}: edits.only(…, rows=…, steps=…): the rows of beams change places from step to step, and "
            f"this call of step {call.step} is given the tokens of earlier steps again. {_WAY}, or leave out rows=."
        )


def in_one_call(edit: Edit, value: Any, site: Site, known: KnownHeads, step: Pass) -> Any:
    """What an operation is called with, edited for one step by an edit that may change the call itself."""
    if isinstance(edit, Steps):
        for one in edit.steps:
            value = in_one_call(one, value, site, known, step)
        return value
    if not changes_call(edit):
        return by_step(edit, value, site, known, [step])
    with passes.standing_in(step):
        new = edit(value, site)
    return value if new is None else new


def by_step(
    edit: Callable[[Any, Site], Any],
    value: Any,
    site: Site,
    known: KnownHeads,
    chosen: Iterable[Pass],
    dim: int | None = None,
) -> Any:
    """A value with the tokens of the chosen steps edited, one step after the other; they are in ``dim`` if it is named.

    The edit sees the value as the step itself has it with a cache. Tensors without these tokens it may see, not change.
    """
    old = list(tree.tensors(value))
    new: list[Tensor | None] = [None] * len(old)
    for step in chosen:
        cuts = [_cut(tensor, known, step, dim, site) for tensor in old]
        seen = tree.with_tensors(value, [cut.of(tensor) for cut, tensor in zip(cuts, old, strict=True)])
        before = list(tree.tensors(seen))
        if all(isinstance(cut, _Tokens) and not tensor.numel() for cut, tensor in zip(cuts, before, strict=True)):
            continue  # as logits, which are those of the last token: no edit has to make sense of nothing
        with passes.standing_in(step):
            made = edit(seen, _in_step(site, step))
        made = seen if made is None else made  # a function may have written to what it was given
        check(seen, made, site)
        for at, (cut, was, now) in enumerate(zip(cuts, before, tree.tensors(made), strict=True)):
            if isinstance(cut, _Tokens):
                whole = new[at]
                new[at] = whole = old[at].clone() if whole is None else whole
                cut.write(whole, now)
            elif now is not was:
                raise _no_tokens(site, step, old[at], cut.why)
    return tree.with_tensors(value, [was if now is None else now for was, now in zip(old, new, strict=True)])


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a step in a tensor."""

    part: Part
    flat: bool
    """Whether rows and tokens share a dim there."""

    def of(self, tensor: Tensor) -> Tensor:
        found = self.part.of(tensor)
        return found.flatten(0, 1) if self.flat else found

    def write(self, whole: Tensor, new: Tensor) -> None:
        rows = self.part.arranged(whole).shape[0]
        self.part.write(whole, new.unflatten(0, (rows, -1)) if self.flat and new.numel() else new)


@dataclass(frozen=True)
class _NoTokens:
    """A tensor in which the tokens of steps are not found."""

    why: str

    def of(self, tensor: Tensor) -> Tensor:
        return tensor


def _in_step(site: Site, step: Pass) -> Site:
    """A site with the number of the call that the step itself is, with a cache: by it a record is found, or noise."""
    call = step.whole or step
    if type(site.call) is not int or call.step is None or step.step is None:
        return site
    return site.but(call=max(site.call - (call.step - step.step), 0))


_QUERY = ("args.0", "kwargs.query")


def _of_keys(tensor: Tensor, site: Site, total: int) -> str:
    """Why a tensor may have a dim of keys, of which a step with a cache has others; empty where it has none."""
    if site.op is None:
        return ""
    if site.port == "input" and not (site.op == "scaled_dot_product_attention" and site.leaf in _QUERY):
        return "what an operation is called with may be keys and values, and those of all earlier steps are in a cache"
    if site.op != "scaled_dot_product_attention" and tuple(tensor.shape[-2:]) == (total, total):
        return "its last dim may be that of the keys, and in its own step there were only those before"
    return ""


def _cut(tensor: Tensor, known: KnownHeads, step: Pass, dim: int | None, site: Site) -> _Tokens | _NoTokens:
    call = step.whole or step
    total, start = call.tokens or 0, step.position or 0
    if tensor.is_nested:
        return _NoTokens("it is nested")
    if why := _of_keys(tensor, site, total):
        return _NoTokens(why)
    try:
        count = parts.positions(tensor, known, dim)
    except NoPart as error:
        return _NoTokens(error.why.rstrip("."))
    if count not in (total, call.kept):
        return _NoTokens(f"it has {count} positions, and the call {total} tokens")
    first = total - count  # of logits, the last ones are kept
    low, high = max(start - first, 0), max(start + (step.tokens or 0) - first, 0)
    which = slice(low, high)
    part = parts.part(tensor, positions=which if dim is None else Along(which, dim), known=known)
    return _Tokens(part, part.arranged(tensor).dim() > tensor.dim())


def _no_tokens(site: Site, step: Pass, tensor: Tensor, why: str) -> EditError:
    call = step.whole or step
    return EditError(
        f"{site.shown}: edits.only(…, steps=…): this call of step {call.step} is given the tokens of earlier steps "
        f"again, and where those of step {step.step} are in a value of shape {tuple(tensor.shape)} cannot be told: "
        f"{why}. {_WAY}, or name the dim of the tokens: positions=edits.along(slice(None), dim=…)."
    )


def of_step(known: Callable[[], KnownHeads]) -> Callable[[], KnownHeads]:
    """The same knowledge of a site; while a step stands for its call, what that is called with is what the step has."""

    def asked() -> KnownHeads:
        found = known()
        return found if found.call is None else found._replace(call=_Sizes(found.call))

    return asked


@dataclass(frozen=True)
class _Sizes:
    call: Callable[[], Sizes | None]

    def __call__(self) -> Sizes | None:
        sizes, now = self.call(), passes.current()
        if sizes is None or now is None or now.whole is None or not now.tokens:
            return sizes
        return sizes._replace(tokens=frozenset({now.tokens}), one=now.tokens == 1)
