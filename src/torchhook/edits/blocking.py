"""``block``: edges of an attention are cut before its softmax, also where a fused kernel hides it.

A fused kernel takes a mask, in which the edges are cut; where the model takes the softmax itself, its scores become
minus infinity there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchhook import _torch
from torchhook._recording import steps as passes
from torchhook._recording.address import Site
from torchhook._values import parts
from torchhook._values.choices import Along, Which, choice
from torchhook._values.heads import UNKNOWN, HeadAxis, KnownHeads, NoPart, head_axis, is_packed, rows_of_heads
from torchhook._values.tree import Inputs
from torchhook._values.wrappers import ORDINARY, is_causal_bias, is_fake
from torchhook.edits.protocol import CataloguedEdit, Edit
from torchhook.errors import EditError

_MASKED = -9_000.0
"""A score below this stands for none: models mask with minus infinity, the least number of a dtype, or -10,000."""


def block(queries: Which, keys: Which, heads: Which = None, rows: Which = None) -> CataloguedEdit:
    """Cut attention: the chosen queries no longer see the chosen keys. The weights of the others sum to 1 again.

    >>> scores = Inputs((torch.zeros(1, 1, 2, 2),), {"dim": -1})
    >>> cut = block(queries=1, keys=0)(scores, Site("attn", op="softmax", port="input"))
    >>> F.softmax(*cut.args, **cut.kwargs)
    tensor([[[[0.5000, 0.5000],
              [0.0000, 1.0000]]]])

    It acts where attention is computed: at ``attn/scaled_dot_product_attention:input`` of a fused kernel,
    ``attn/multi_head_attention_forward:input`` of ``nn.MultiheadAttention``, and ``attn/softmax:input`` of a model that
    takes the softmax itself. A query that would see nothing any more is refused: nothing could be made of it.

    Args:
        queries: Which queries of this call: an integer, a slice, a list of integers or a boolean mask, the same for all
            rows; ``None`` for all. While a model generates, a call after the first has one.
        keys: Which keys, those in the cache included; ``None`` for all. A static cache has keys for tokens that are
            yet to come, too: count from the front there.
        heads: In which heads of the queries; ``None`` for all.
        rows: In which rows of the batch; ``None`` for all.
    """
    chosen = {"queries": queries, "keys": keys, "heads": heads, "rows": rows}
    kept = {name: choice(which, name) for name, which in chosen.items()}
    if any(isinstance(which, Along) for which in kept.values()):
        raise TypeError("edits.block knows its dims: give an integer, a slice, a list of integers or a boolean mask.")
    return Block(**kept)


@dataclass(frozen=True, eq=False, repr=False)
class Block(CataloguedEdit):
    changes_call = True
    queries: Any
    keys: Any
    heads: Any = field(default=None, kw_only=True)
    rows: Any = field(default=None, kw_only=True)

    def __call__(self, value: Any, site: Site) -> Any:
        return self.apply(value, site, UNKNOWN)

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        # Before anything runs: at another place there is nothing to cut.
        if site.port != "input" or site.op not in _WAYS or site.leaf:
            place = site.place.every_call.shown
            raise EditError(
                f"{site.shown}: edits.block cuts attention where it is computed, and this is "
                f"{place if site.role else 'another place'}. Name {_advice(site)}."
            )
        return _Placed(self, known())

    def apply(self, value: Any, site: Site, known: KnownHeads) -> Any:
        """Cut the edges in a call, at a site where this much is known of the heads."""
        way = _WAYS.get(site.op or "")
        if way is None:
            raise EditError(f"{site.shown}: edits.block acts on the inputs of {', '.join(_WAYS)}.")
        now = passes.current()
        try:
            return way(self if now is None or now.whole is None else self._of_step(now), value, known)
        except NoPart as error:
            raise EditError(f"{site.shown}: {self!r}: {error}") from None

    def _of_step(self, step: passes.Pass) -> Block:
        """The edges that are cut in a step with a cache, counted in a call that is given the tokens of all steps."""
        start = step.position or 0
        stop = start + (step.tokens or 0)
        queries = np.arange(start, stop)[parts.index(self.queries, stop - start, "queries")]
        # It had no keys yet of the steps after it.
        keys = np.arange(stop)[parts.index(self.keys, stop, "keys")]
        return replace(self, queries=queries.tolist(), keys=keys.tolist())

    def cut(self, shape: tuple[int, ...], heads: HeadAxis | None, device: torch.device) -> Tensor:
        """Where edges are cut in scores of this shape; dims in which all are alike have size 1."""
        choices: dict[int, tuple[str, Any]] = {}
        choices[len(shape) - 2], choices[len(shape) - 1] = ("queries", self.queries), ("keys", self.keys)
        if self.rows is not None:
            if len(shape) < 3:
                raise NoPart(f"scores of shape {shape} have no rows.")
            choices[0] = ("rows", self.rows)
        if self.heads is not None:
            assert heads is not None
            choices[heads.dim] = ("heads", self.heads)
        cut = torch.ones([1] * len(shape), dtype=torch.bool, device=device)
        for dim, (name, which) in choices.items():
            along = np.zeros(shape[dim], dtype=bool)
            along[parts.index(which, shape[dim], name)] = True
            # One dim at a time: a whole map of a long text is much to move to a GPU.
            moved = torch.from_numpy(along).to(device, non_blocking=True)
            cut = cut & moved.reshape([-1 if one == dim else 1 for one in range(len(shape))])
        return cut


@dataclass(frozen=True, eq=False, repr=False)
class _Placed(CataloguedEdit):
    """The cut in a session, where the modules around are known."""

    changes_call = True
    edit: Block
    known: KnownHeads

    def __call__(self, value: Any, site: Site) -> Any:
        return self.edit.apply(value, site, self.known)

    def __repr__(self) -> str:
        return repr(self.edit)


def _advice(site: Site) -> str:
    """Which address to write instead: the one there is, or what it looks like where the site says nothing of it."""
    if site.op in _WAYS:
        return f"all that the call takes: {f'{site.path}/{site.op}:input'!r}"
    ways = ", ".join(repr(f"…/{op}:input") for op in _WAYS)
    return f"the call in the module that attends, one of {ways}: th.ops(model, inputs) shows which it is"


# -- the ways in which models attend ----------------------------------------------------------------------------------


def _fused(edit: Block, value: Any, known: KnownHeads) -> Inputs:
    call = _bound(_FUSED, value)
    query, key = call["query"], call["key"]
    shape = (*query.shape[:-1], key.shape[-2])
    cut = _cut_in(edit, shape, known._replace(asked=True), query.device)
    mask = _plain(call["attn_mask"], query.device)
    if call["is_causal"]:
        # From the upper left corner, as the kernel has it.
        causal = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
        mask = causal if mask is None else _both(mask, causal)
    if mask is None:
        mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device)
    kept = mask & ~cut if mask.dtype == torch.bool else torch.where(cut, -torch.inf, mask)
    _check_rows(mask, kept)
    return Inputs((query, key, call["value"]), {**_rest(call, 3), "attn_mask": kept, "is_causal": False})


def _cut_in(edit: Block, shape: tuple[int, ...], known: KnownHeads, device: torch.device) -> Tensor:
    """Where edges are cut in the scores of a fused call, as the kernel has them."""
    if is_packed(shape, known):
        whole = (shape[0], shape[1] * shape[2], 1, shape[3])
        cut = edit.cut(whole, HeadAxis(1, whole[1]), device)
        # In the order in which unpacked queries have them.
        return cut.expand(-1, whole[1], -1, -1).reshape(len(cut), *shape[1:3], -1)
    axis = None
    if edit.heads is not None:
        if len(shape) < 4:
            raise NoPart(f"scores of shape {shape} have no dim of heads.")
        # By the contract of the kernel; what modules say is not needed.
        axis = HeadAxis(len(shape) - 3, shape[-3])
    return edit.cut(shape, axis, device)


def _both(mask: Tensor, allowed: Tensor) -> Tensor:
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)


def _plain(mask: Tensor | None, device: torch.device) -> Tensor | None:
    """A mask as its numbers: a subclass may hold none, and say what it means to the kernel alone."""
    if mask is None or type(mask) in ORDINARY:
        return mask
    if is_causal_bias(mask):
        return _torch.materialized(mask, device)
    raise NoPart(f"attn_mask is a {type(mask).__name__}, whose numbers may not be the mask that the kernel uses.")


def _multi_head(edit: Block, value: Any, known: KnownHeads) -> Inputs:
    call = _bound(_MULTI_HEAD, value)
    query, key, heads = call["query"], call["key"], call["num_heads"]
    batch = query.shape[1] if query.dim() == 3 else 1
    shape = (batch, heads, query.shape[0], key.shape[0])
    if call["bias_k"] is not None or call["add_zero_attn"]:
        raise NoPart("a module with bias_k or add_zero_attn has keys that no position has.")
    cut = edit.cut(shape, HeadAxis(1, heads), query.device).expand(shape).flatten(0, 1)
    # True in these masks means that an edge is cut already.
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    if mask is None:  # as numbers: the module has made some of its padding, and torch wants both alike
        mask = torch.zeros(cut.shape[-2:], dtype=query.dtype, device=query.device)
    kept = mask | cut if mask.dtype == torch.bool else torch.where(cut, -torch.inf, mask)
    if padding is not None:
        padded = (padding if padding.dtype == torch.bool else padding < _MASKED).reshape(batch, 1, 1, -1)
        padded = padded.expand(shape).flatten(0, 1)
        _check_rows(~_masked(mask) & ~padded, ~_masked(kept) & ~padded)
    else:
        _check_rows(~_masked(mask), ~_masked(kept))
    return Inputs(tuple(call.values())[:5], {**_rest(call, 5), "attn_mask": kept, "is_causal": False})


def _masked(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask < _MASKED


def _softmax(edit: Block, value: Any, known: KnownHeads) -> Any:
    scores = value.args[0] if isinstance(value, Inputs) and value.args else value
    if not isinstance(scores, Tensor) or scores.dim() < 3:
        raise NoPart("this softmax is not taken of scores of queries and keys.")
    dim = value.kwargs.get("dim", value.args[1] if len(value.args) > 1 else None) if isinstance(value, Inputs) else -1
    if dim not in (-1, scores.dim() - 1):
        raise NoPart(f"this softmax is taken over dim {dim}, and not over the keys, the last.")
    if scores.dim() == 3 and known.folded > 1 and not (edit.rows is None and edit.heads is None):
        return _softmax_of_all(edit, value, scores, known)
    axis = None if (edit.heads is None and scores.dim() != 4) or not known.counts else head_axis(scores.shape, known)
    if axis is not None and axis.dim == scores.dim() - 2:
        raise NoPart(f"queries are not the dim before the last of {tuple(scores.shape)}: heads are.")
    if axis is None and edit.heads is not None:
        axis = head_axis(scores.shape, known)  # which says what is missing
    keys = scores.shape[-1] - known.sinks
    return _without(edit.cut((*scores.shape[:-1], keys), axis, scores.device), value, scores, known)


def _softmax_of_all(edit: Block, value: Any, scores: Tensor, known: KnownHeads) -> Any:
    """Of scores in which rows and heads share the first dim."""
    rows, heads, (queries, keys) = rows_of_heads(scores.shape, known), known.folded, scores.shape[1:]
    cut = edit.cut((rows, heads, queries, keys - known.sinks), HeadAxis(1, heads), scores.device)
    return _without(cut.expand(rows, heads, -1, -1).flatten(0, 1), value, scores, known)


def _without(cut: Tensor, value: Any, scores: Tensor, known: KnownHeads) -> Any:
    """What a softmax takes, without the edges that are cut."""
    new = scores.masked_fill(F.pad(cut, (0, int(known.sinks))), -torch.inf)
    _check_rows(scores, new)
    return Inputs((new, *value.args[1:]), value.kwargs) if isinstance(value, Inputs) else new


def _check_rows(before: Tensor, after: Tensor) -> None:
    """Refuse to leave a query nothing to see: its softmax would be 0/0, or all that was masked before."""
    if is_fake(after):
        return
    seen, sees = (mask if mask.dtype == torch.bool else mask > _MASKED for mask in (before, after))
    lost = seen.any(-1) & ~sees.any(-1)
    # On a GPU this waits; what comes out otherwise may be NaN, or a mean over what is to come.
    if bool(lost.any()):
        query = int(lost.nonzero()[0, -1])
        raise NoPart(
            f"query {query} would see no key any more. Leave it out of queries= (the first of a causal attention sees "
            "itself alone), or leave it a key."
        )


def _bound(signature: inspect.Signature, value: Any) -> dict[str, Any]:
    """The arguments of a call by their names, those left out too."""
    args, kwargs = (value.args, value.kwargs) if isinstance(value, Inputs) else ((value,), {})
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise NoPart(f"the call has other arguments than torch's own: {error}.") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _rest(call: dict[str, Any], first: int) -> dict[str, Any]:
    return dict(list(call.items())[first:])


def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> None:
    """As torch has it, whose own is a builtin without a signature."""


_FUSED = inspect.signature(_scaled_dot_product_attention)
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)

_WAYS: dict[str, Callable[[Block, Any, KnownHeads], Any]] = {
    "scaled_dot_product_attention": _fused,
    "multi_head_attention_forward": _multi_head,
    "softmax": _softmax,
}
