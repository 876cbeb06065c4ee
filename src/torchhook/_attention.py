"""``attention``: the maps of every attention call of a model, fused or not.

A fused call hides its map but not its inputs, so the map is computed again from query, key, mask and scale. Where a
model multiplies and takes the softmax itself, that softmax is the map.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook import _torch
from torchhook._core import calling, never_ran
from torchhook._core.heads import heads_at
from torchhook._core.index import Index, is_callable
from torchhook._core.keep import Keep
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.site_operations import SiteListener
from torchhook._core.taps import Look, as_arguments
from torchhook._core.targets import Target
from torchhook._recording.address import Site, shown
from torchhook._recording.records import Recording
from torchhook._values.heads import Where, is_packed, unpacked
from torchhook._values.wrappers import ORDINARY, is_causal_bias
from torchhook._words import listed
from torchhook.errors import NoAttentionError


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN = _NotGiven()


@overload
def attention(
    model: nn.Module, *, sites: Selector | None = None, device: torch.device | str | None = None
) -> Session: ...
@overload
def attention(
    model: nn.Module, inputs: Any, *, sites: Selector | None = None, device: torch.device | str | None = None
) -> Recording: ...
def attention(
    model: nn.Module,
    inputs: Any = _NOT_GIVEN,
    *,
    sites: Selector | None = None,
    device: torch.device | str | None = None,
) -> Recording | Session:
    """Run the model once and return its attention maps by module: batch × heads × queries × keys, rows summing to 1.

    >>> encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> maps = attention(encoder, torch.randn(1, 5, 8))
    >>> maps["self_attn"].shape
    torch.Size([1, 2, 5, 5])

    Without ``inputs`` it is a session: it keeps the maps of whatever runs in the block, call by call, as those of each
    step of ``model.generate``.

    >>> with attention(encoder) as maps:
    ...     outputs = [encoder(torch.randn(1, tokens, 8)) for tokens in (5, 6)]
    >>> [tuple(weights.shape) for weights in maps.all("self_attn")]
    [(1, 2, 5, 5), (1, 2, 6, 6)]

    Attention without heads has one. Where a model attends in windows, its maps have the further dims that its scores
    have, or a batch of all windows. A map that a model made with a softmax of its own is that softmax: one over more
    than the keys, such as the sink of gpt-oss, keeps its further columns, at the end. Masks, sliding windows, position
    biases and soft caps are in a map as they were in the call.

    ``inputs`` are a tuple of arguments, a dict of keyword arguments, ``th.Inputs(args, kwargs)`` for both, or else the
    one argument. With them the model runs in eval mode and without gradients, so that no dropout is in the maps nor
    before them; the model, the inputs and the process are left as they were: modes, buffers, caches, gradients, random
    numbers. In a session the model runs as the block calls it, and no map has dropout in it. ``sites`` restricts the
    modules, ``device`` is where the maps are kept.
    """
    session = _Attending(model, sites, device)
    if inputs is _NOT_GIVEN:
        return session.handed_out("what th.attention(model) returned")
    session.reports = False
    with calling.undisturbed(model), calling.evaluating(model), torch.no_grad(), session as recording:
        calling.call(model, calling.arguments(inputs))
    if not len(recording):
        raise NoAttentionError(session.not_seen())
    return recording


class _Attending(Session):
    """Looks at every operation that attention is made with, in the modules that ``sites`` chooses."""

    _opened_as = "th.attention(model) as maps"

    _chosen: _Modules

    def __init__(self, model: nn.Module, sites: Selector | None, device: torch.device | str | None) -> None:
        super().__init__(model)
        self._others: dict[str, None] = {}
        self._device = device
        # No method of the session that holds it: that would be a cycle, freed only when the collector comes by.
        self.prepare(functools.partial(_choose, sites), _build)

    def build(self, modules: _Modules) -> None:
        """For one opening."""
        index, recording, keep = self.index, self.recording, Keep(device=self._device)
        self._others.clear()
        # A map is that of the call as it was made: also what sessions changed that were opened after this one.
        self.listen(SiteListener(self.scope, last=True))
        for path, module in modules.others.items():
            _look(self, path, module, _notices(module, path, self._others))
        names = list[tuple[str, str]]()
        recording.other_names = lambda: names
        for path, module in modules.chosen.items():
            names += [(name, path) for name in index.names(module) if name != path]
            put = keep.recorder(recording.opened(Site(path)).append, recording.order)
            _look(self, path, module, _looks(module, put, heads_at(index, Target(Site(path, op=_FUSED), module))))
        recording.wait_with(keep.wait)
        self._keeps = (*self._keeps, keep)

    def _report(self, error: BaseException | None, is_as_it_was: bool) -> None:
        """Every module was looked at, and most do not attend: only if none did, there is something to say."""
        if error is None and not len(self.recording):
            why = self.not_seen() if self._taps.any_ran else never_ran.NOT_CALLED
            self.recording.missing[""] = why

    def not_seen(self) -> str:
        """Why there are no maps."""
        if self._others:
            paths, written = list(self._chosen.chosen), self._chosen.written
            chosen = [f"{written[p]!r} ({shown(p)})" if p in written else repr(shown(p)) for p in paths]
            others = sorted(self._others, key=lambda path: -max(_shared(path, other) for other in paths))
            return (
                f"no attention call was seen in what sites= chose, {listed(chosen)}. It is called in "
                f"{listed([repr(shown(path)) for path in others])}: choose from these."
            )
        return (
            f"no attention call was seen in {self.recording.model_name}: it calls neither scaled_dot_product_attention "
            "nor nn.MultiheadAttention nor a softmax over scores of 4 or more dims. Kernels such as flash-attn and "
            "flex_attention hide query and key; load the model with attn_implementation='sdpa' or 'eager'."
        )


class _Modules(NamedTuple):
    """Those of a model that can run, by one path each."""

    chosen: dict[str, nn.Module]
    written: dict[str, str]
    """The chosen ones as they were written, where a standard name stands for another place than one would think."""
    others: dict[str, nn.Module]
    """Where else the model attends is only for the advice, should the chosen ones never do."""


def _choose(sites: Selector | None, index: Index) -> _Modules:
    every = {index.names(module)[0]: module for module in index.distinct.values() if is_callable(module)}
    if sites is None:
        return _Modules(every, {}, {})
    targets = resolve(index, sites)
    of_module = {id(target.module): target for target in targets}  # one with several names is looked at once
    chosen = {target.site.path: target.module for target in of_module.values()}
    written = {t.site.path: t.site.every_call.shown for t in targets if t.site.role}
    return _Modules(chosen, written, {path: m for path, m in every.items() if id(m) not in of_module})


def _build(session: Session, modules: _Modules) -> None:
    assert isinstance(session, _Attending)
    session.build(modules)


def _look(session: Session, path: str, module: nn.Module, looks: dict[str, Look]) -> None:
    for op, look in looks.items():
        port = "output" if op == "softmax" else "input"
        session.look(Target(Site(path, op=op, port=port), module), look)


def _shared(path: str, other: str) -> int:
    """How many names two paths begin with together: the more, the nearer they are."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def rollout(maps: Recording, discard: float = 0.0) -> Tensor:
    """Attention rollout: how much each token of the first layer reaches each of the last, batch × tokens × tokens.

    Heads are averaged, the residual connection counts as an identity, layers are multiplied in the order in which they
    ran. ``discard`` sets that share of the smallest weights of each map to zero first.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"discard={discard}: give a share from 0 (none) to less than 1.")
    result: Tensor | None = None
    for record in maps.records():
        shape = tuple(record.value.shape)
        if len(shape) != 4:
            raise ValueError(
                f"{record.site}: rollout needs maps of batch × heads × queries × keys, found {shape}; choose sites=."
            )
        # quantile takes no half precision, and a product of many layers should not be in it.
        weights = record.value.float().mean(1)
        if weights.shape[-1] != weights.shape[-2] or (result is not None and weights.shape != result.shape):
            raise ValueError(f"{record.site}: rollout needs square maps of one size, found {shape}; choose sites=.")
        if discard:
            limit = weights.flatten(1).quantile(discard, dim=1)[:, None, None]
            weights = weights.masked_fill(weights < limit, 0.0)
        weights = weights + torch.eye(weights.shape[-1], device=weights.device)
        weights = weights / weights.sum(-1, keepdim=True)
        # From the left: a later layer mixes what the earlier ones have mixed.
        result = weights if result is None else weights @ result
    if result is None:
        raise ValueError("rollout needs at least one attention map.")
    return result


# -- from calls to maps ---------------------------------------------------------------------------


_FUSED = "scaled_dot_product_attention"


def _looks(module: nn.Module, put: Look, heads: Where) -> dict[str, Look]:
    """What to do at each operation that attention is made with; ``heads`` tells what is known of them."""
    # Not the call of the operation: a module may attend in several ways, and not every softmax is a map.
    calls = 0

    def taken(weights: Tensor) -> None:
        nonlocal calls
        put(weights, calls)
        calls += 1

    def fused(value: Any, call: int) -> None:
        args, kwargs = as_arguments(value)
        weights = attention_map(*args, **kwargs)
        taken(unpacked(weights) if is_packed(weights.shape, heads()) else _with_heads(weights))

    def multi_head(value: Any, call: int) -> None:
        args, kwargs = as_arguments(value)
        # Bound by name: what is overruled may have come by position. training is true by default, which would put
        # dropout into the map.
        bound = _MULTI_HEAD.bind(*args, **kwargs)
        bound.arguments |= {"need_weights": True, "average_attn_weights": False, "training": False}
        taken(_batched(F.multi_head_attention_forward(*bound.args, **bound.kwargs)[1]))

    def native(value: Any, call: int) -> None:
        args, kwargs = as_arguments(value)
        arguments = dict(zip(_NATIVE, args, strict=False)) | kwargs
        arguments |= {"need_weights": True, "average_attn_weights": False}
        taken(_batched(_torch.attention_weights(arguments[name] for name in _NATIVE)))

    def softmax(value: Any, call: int) -> None:
        if isinstance(value, Tensor) and _is_map(value, module):
            taken(_with_heads(_heads_first(value, module)))

    return {
        _FUSED: _without_grad(fused),
        "multi_head_attention_forward": _without_grad(multi_head),
        "_native_multi_head_attention": _without_grad(native),
        "softmax": softmax,
    }


def _notices(module: nn.Module, path: str, seen: dict[str, None]) -> dict[str, Look]:
    """As ``_looks``, for a module whose maps nobody asked for: only where they are is noted."""

    def notice(value: Any, call: int) -> None:
        seen[path] = None

    def softmax(value: Any, call: int) -> None:
        if isinstance(value, Tensor) and _is_map(value, module):
            seen[path] = None

    fused = (_FUSED, "multi_head_attention_forward", "_native_multi_head_attention")
    return {**dict.fromkeys(fused, notice), "softmax": softmax}


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
# Written out, because a builtin has no signature to ask.
_NATIVE = (
    "query",
    "key",
    "value",
    "embed_dim",
    "num_head",
    "qkv_weight",
    "qkv_bias",
    "proj_weight",
    "proj_bias",
    "mask",
    "need_weights",
    "average_attn_weights",
    "mask_type",
)


def _without_grad(look: Look) -> Look:
    def quiet(value: Any, call: int) -> None:
        with torch.no_grad():
            look(value, call)

    return quiet


def attention_map(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The map inside ``F.scaled_dot_product_attention``, in float32 at least."""
    # The fused kernels too add up half precision in single.
    query, key = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (query, key))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        # From the upper left corner, as the fused call has it, also where there are more keys than queries.
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    if attn_mask is not None:
        attn_mask = _plain_mask(attn_mask, scores.device)
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)  # a query that may look nowhere: the fused call gives zeros
    return scores.softmax(-1).masked_fill(nothing, 0.0)


def _plain_mask(mask: Tensor, device: torch.device) -> Tensor:
    """A mask as its numbers: a subclass may hold none, and say what it means to the fused call alone."""
    if type(mask) in ORDINARY:
        return mask
    if is_causal_bias(mask):
        return _torch.materialized(mask, device)
    raise TypeError(
        f"attn_mask is a {type(mask).__name__}, a tensor subclass whose numbers may not be the mask that the fused "
        "call uses: attention knows plain tensors and the causal biases of torch.nn.attention.bias."
    )


def _with_heads(weights: Tensor) -> Tensor:
    """A map with a dim for heads, one for those that have none, and a batch."""
    if weights.dim() == 2:
        weights = weights[None]
    return weights[:, None] if weights.dim() == 3 else weights


def _heads_first(weights: Tensor, module: nn.Module) -> Tensor:
    """A map whose heads come before its queries: those of Longformer are batch × queries × heads × keys."""
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head")
    heads = next((count for name in names if isinstance(count := getattr(module, name, None), int)), None)
    swapped = weights.dim() == 4 and weights.shape[2] == heads != weights.shape[1]
    return weights.transpose(1, 2) if swapped else weights


def _batched(weights: Tensor | None) -> Tensor:
    assert weights is not None
    return weights if weights.dim() == 4 else weights[None]


def _is_map(value: Tensor, module: nn.Module) -> bool:
    """Whether the result of a softmax is an attention map, and not a gate or a class score."""
    named = any(word in type(module).__name__.lower() for word in ("attention", "attn"))
    if value.dim() < 4 and not (value.dim() == 3 and named):
        return False
    # A softmax over another dim does not sum to 1 here; in half precision, rows miss it by some thousandths.
    return bool(torch.allclose(value.float().sum(-1), torch.ones((), device=value.device), atol=1e-2))
