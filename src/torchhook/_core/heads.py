"""What the modules around a site say of attention heads: their numbers and sizes, and whether they pass there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.targets import Target
from torchhook._recording.address import Site, shown
from torchhook._values.heads import KnownHeads

# What models call these numbers, on the attention module or in its config.
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "encoder_attention_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "kv_n_heads", "num_k_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
_DIMS = (
    *("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "d_head", "dim_head"),
    *("qk_head_dim", "v_head_dim", "value_head_dim", "kv_channels"),
)
_WIDTHS = ("inner_dim", "all_head_size", "embed_dim", "hidden_size", "d_model", "n_embd", "dim")

# A projection is known by its name: where the model is as wide as its heads together, sizes cannot tell them apart.
_MAKES_HEADS = {"q", "k", "v", "query", "key", "value", "qkv", "kv", "wq", "wk", "wv", "wqkv", "c_attn", "q_attn"}
_JOINS_HEADS = {"o", "out", "output", "dense", "proj", "wo", "c_proj", "lin"}
# Of several in one, the size may be that of another number of heads by chance; of a low rank, of all heads together.
_FUSED = {"qkv", "kv", "wqkv", "c_attn"}
_ONE_OF_THREE = {"q", "k", "v", "query", "key", "value"}
_LOW_RANK = {"a", "down"}
_NO_ATTENTION = {"mlp", "ffn", "ff", "feed", "forward", "experts", "intermediate", "fc"}

_TRANSFORMERS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)

_INWARD = ("input", "grad_input")
_PRODUCTS = ("matmul", "bmm")
_TAKES_HEADS_FIRST = {"q": _PRODUCTS, "v": _PRODUCTS, "k": ("transpose", "swapaxes", "mT")}
_FUSED_CALL = "scaled_dot_product_attention"
_KEYS_AND_VALUES = ("args.1", "args.2", "kwargs.key", "kwargs.value")


class HeadsAt:
    """Asks for what is known of the heads at a target, once; most edits and transforms never do."""

    # As functools.cache, which takes longer to make than an edit to be placed.
    __slots__ = ("_ask", "_found")

    def __init__(self, ask: Callable[[], KnownHeads]) -> None:
        self._ask = ask
        self._found: KnownHeads | None = None

    def __call__(self) -> KnownHeads:
        if self._found is None:
            self._found = self._ask()
        return self._found


def heads_at(index: Index, target: Target) -> HeadsAt:
    """What asks for them by the names of the modules alone."""
    return HeadsAt(lambda: known_heads(index, target))


def known_heads(index: Index, target: Target) -> KnownHeads:
    """What is known of the heads at a target."""
    site = target.site
    names = site.path.split(".") if site.path else []
    paths = [".".join(names[:end]) for end in range(len(names) + 1)]
    chain = [(path, module) for path in paths if (module := index.find(path)) is not None]
    return _around(index, site, names, chain)._replace(time_first=_time_first(chain, site.op))


def _around(index: Index, site: Site, names: Sequence[str], chain: Sequence[tuple[str, nn.Module]]) -> KnownHeads:
    """What the attention around a site says, if there is one."""
    depth = _attention(chain, names)
    if depth is None:
        return KnownHeads(why_not=f"{shown(site.path)!r} is in no attention that says how many heads it has")
    path, attention = chain[depth]
    inside = names[depth:]
    # Outwards from the attention itself; what it does not say, its parts, and then the whole model's config may.
    sources = [*_told(attention), *(one for module in attention.modules() for one in _told(module))]
    sources += [config for _, module in reversed(chain[:depth]) for config in _configs(module)]
    queries = _first(sources, _QUERIES)
    where = f"{type(attention).__name__} at {shown(path)!r}"
    if queries is None:
        return KnownHeads(why_not=f"neither {where} nor a config around it says how many heads there are")
    joined, why_not = _lies_joined(inside, site.op, site.port, index.find(site.path))
    fused = joined and site.port not in _INWARD and _is_fused(_words(_projection(inside)))
    sections = _first([attention], ("split_size",)) if _splits(attention) else None
    sinks = getattr(attention, "sinks", None) is not None
    keys, dims = _keys(sources, queries), _dims(sources, queries)
    op = site.op and site.op.partition("(")[0]
    first, shared, asked = _heads_first(site, op), _is_shared(site, op), site.is_asked
    return KnownHeads(where, queries, keys, dims, sections, op, sinks, joined, fused, why_not, first, shared, asked)


def _time_first(chain: Sequence[tuple[str, nn.Module]], op: str | None) -> bool | None:
    """Whether tokens come before rows: torch's own modules say it, of all that is inside of them."""
    if op is not None:  # inside of a module, torch itself moves dims
        return None
    for _, module in reversed(chain):
        if isinstance(module, _TRANSFORMERS):
            first = next((one.batch_first for one in module.modules() if hasattr(one, "batch_first")), None)
            return None if first is None else not first
    # The last states have layers first in any case.
    return True if chain and isinstance(chain[-1][1], nn.RNNBase) and not chain[-1][1].batch_first else None


def _heads_first(site: Site, op: str | None) -> bool:
    """Whether heads come before tokens: what a product takes of queries and values has tokens in the last dim but one.

    Keys are named where they are turned; who permutes all dims may turn them from any order.
    """
    return site.port in _INWARD and op in _TAKES_HEADS_FIRST.get(site.kind, ())


def _is_shared(site: Site, op: str | None) -> bool:
    fused = op == _FUSED_CALL and site.leaf in _KEYS_AND_VALUES
    return op is not None and (site.kind in ("k", "v") or fused)


def _attention(chain: Sequence[tuple[str, nn.Module]], names: Sequence[str]) -> int | None:
    """The innermost module around a site that is an attention: by its class, or because it counts heads itself."""
    for depth in range(len(chain) - 1, -1, -1):
        module = chain[depth][1]
        inside = names[depth:]
        if any(_words(name) & _NO_ATTENTION for name in inside):
            return None
        if any(word in type(module).__name__.lower() for word in ("attention", "attn")):
            return depth
        # A model may count heads too: only its own projections are those of an attention then.
        if len(inside) <= 1 and _first([module], _QUERIES) is not None:
            return depth
    return None


def _configs(module: nn.Module) -> list[object]:
    config = getattr(module, "config", None)
    return [] if config is None else [config]


def _told(module: nn.Module) -> list[object]:
    return [module, *_configs(module)]


def _first(sources: Iterable[object], names: Sequence[str]) -> int | None:
    """The first number that goes by one of these names, source by source."""
    for source in sources:
        for name in names:
            number = getattr(source, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None


def _keys(sources: Sequence[object], queries: int) -> int:
    keys, groups = _first(sources, _KEYS), _first(sources, _GROUPS)
    if keys is not None:
        return keys
    return queries // groups if groups is not None and queries % groups == 0 else queries


def _dims(sources: Sequence[object], queries: int) -> tuple[int, ...]:
    # Of the first that says any: a config may say what a layer of its own does not keep to.
    for source in sources:
        found = [number for name in _DIMS if (number := _first([source], (name,))) is not None]
        if found:
            return tuple(dict.fromkeys(found))
    width = _first(sources, _WIDTHS)
    return (width // queries,) if width is not None and width % queries == 0 else ()


def _lies_joined(inside: Sequence[str], op: str | None, port: str, module: nn.Module | None) -> tuple[bool, str]:
    """Whether heads lie side by side in what passes here; and if not, why."""
    if op is not None:
        return False, f"the operation {op!r} has heads in a dim of their own, in values of 4 dims"
    if not inside:
        return False, "what an attention takes and gives is no longer, or not yet, divided into heads"
    name = _projection(inside)
    words, inward = _words(name), port in _INWARD
    normalizes = "norm" in type(module).__name__.lower() or "norm" in words
    if words & _MAKES_HEADS and words & _LOW_RANK:
        return False, f"{name!r} comes before the heads are made, by the projection after it"
    if words & _MAKES_HEADS and (normalizes or _projects(module)):
        return not inward or normalizes, f"{name!r} makes the heads: they are in its output, not in its input"
    if words & _JOINS_HEADS and _projects(module):
        return inward, f"{name!r} joins the heads: they are in its input, not in its output"
    return False, f"whether {name!r} comes before or after the heads are joined cannot be told from its name"


def _projection(inside: Sequence[str]) -> str:
    """The name that tells; of a list of modules, the name of the list: "to_out.0"."""
    return next((name for name in reversed(inside) if not name.isdigit()), inside[-1])


def _is_fused(words: set[str]) -> bool:
    return bool(words & _FUSED) or len(words & _ONE_OF_THREE) > 1


def _splits(attention: nn.Module) -> bool:
    """Whether an attention splits a fused projection into sections of the size that it states: BLOOM only states it."""
    forward: Any = getattr(type(attention), "forward", None)
    names = getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ()) if forward is not None else ()
    return {"split", "split_size"} <= set(names)


def _projects(module: nn.Module | None) -> bool:
    """Whether a module multiplies by a matrix: what is dropped after a projection may have its name."""
    weight = getattr(module, "weight", None)
    return (isinstance(weight, Tensor) and weight.dim() > 1) or hasattr(module, "out_features")


def _words(name: str) -> set[str]:
    """The words of a name, and the name itself.

    >>> sorted(_words("q_proj"))
    ['proj', 'q', 'q_proj']
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return {*spaced.split("_"), spaced}
