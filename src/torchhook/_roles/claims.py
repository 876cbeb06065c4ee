"""What must hold for a name to be right: sums, norms, products, each as one formula over values at sites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook._attention import attention_map
from torchhook._recording.address import Site
from torchhook._values.tree import Inputs

Values = dict[Site, Any]


@dataclasses.dataclass(slots=True)
class Claim:
    """A formula: what it says, the names that go into it, those that come out of it, and the sites that it reads."""

    text: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    needs: tuple[Site, ...]
    holds: Callable[[Values], str | None]
    """Returns what is wrong, or ``None``."""
    sums: bool = False
    """Whether it is a sum: a part is only seen in it if it is as large as the others."""
    founds: bool = False
    """Whether without it there is no stream, and no name of it."""
    doubts: tuple[str, ...] = ()
    """The names that are wrong if it does not hold, where another claim vouches for the others."""
    calls: tuple[Site, ...] = ()
    """Sites at which all that a call takes is read; at all others, one tensor."""


class Runs(NamedTuple):
    """What passed one site in two runs."""

    one: Any
    other: Any


def different(one: Tensor, other: Tensor) -> str | None:
    """How two tensors differ by more than rounding, element by element: large ones must not hide the small."""
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if torch.equal(one, other):
        return None
    steps = 2.0**-8 if one.dtype == torch.bfloat16 else 2.0**-11 if one.dtype == torch.float16 else 1e-5
    a, b = one.double(), other.double()
    allowed = 4 * steps * torch.maximum(a.abs(), b.abs()) + steps * b.square().mean().sqrt()
    worst = ((a - b).abs() - allowed).max()
    if bool(worst <= 0):
        return None
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return f"off by {error:.2g} of their size" if math.isfinite(error) else "not finite"


def equal(text: str, a: tuple[str, Site], b: tuple[str, Site]) -> Claim:
    """One value is another; what has no name is ``""``."""
    inputs, results = ((name,) if name else () for name, _ in (a, b))
    return Claim(text, inputs, results, (a[1], b[1]), lambda values: different(values[a[1]], values[b[1]]))


def total(text: str, inputs: dict[str, Site], result: tuple[str, Site], norm: nn.Module | None = None) -> Claim:
    """The result is the sum of the inputs, through a norm if there is one."""
    names, places = tuple(inputs), tuple(inputs.values())

    def holds(values: Values) -> str | None:
        wanted = values[result[1]]
        parts = [_laid_out(values[place], wanted) for place in places]
        if len({part.shape for part in parts}) > 1:
            return f"shapes {', '.join(str(tuple(part.shape)) for part in parts)}"
        # In any order: with three parts the model may have added the last two first.
        orders = [[parts[i], parts[j], parts[k]] for i, j, k in _ORDERS] if len(parts) == 3 else [parts]
        found = [different(through(_summed(order), norm), wanted) for order in orders]
        return None if None in found else found[0]

    return Claim(text, names, (result[0],), (*places, result[1]), holds, sums=True)


_ORDERS = ((0, 1, 2), (1, 2, 0), (0, 2, 1))


def _laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Some blocks make one dim of batch and tokens on the way; as many dims in another order are something else."""
    alike = part.dim() != like.dim() and part.numel() == like.numel() and part.shape[-1:] == like.shape[-1:]
    return part.reshape(like.shape) if alike else part


def _summed(parts: list[Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def through(value: Tensor, *modules: nn.Module | None) -> Tensor:
    """What modules of the model make of a value, one after the other."""
    for module in modules:
        if module is None:
            continue
        try:
            value = module(value)
        except Exception as error:  # it is the model's, and may raise anything
            raise ValueError(f"{type(module).__name__} does not take it: {error}") from error
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(module).__name__} makes no tensor of it, but a {type(value).__name__}")
    return value


def normalizes(text: str, norm: nn.Module, inputs: tuple[str, Site], result: tuple[str, Site]) -> Claim:
    """The result is a norm of the input: that of twice the input is the same."""

    def holds(values: Values) -> str | None:
        value = values[inputs[1]]
        once, twice = through(value, norm), through(value * 2, norm)
        rough = (once - twice).abs().max() > 0.05 * once.abs().max()  # what is added to the variance is not doubled
        return f"{type(norm).__name__} is no norm" if bool(rough) else different(once, values[result[1]])

    return Claim(text, (inputs[0],), (result[0],), (inputs[1], result[1]), holds)


def projected(
    text: str, modules: list[nn.Module], scaled: bool, z: tuple[str, Site], result: tuple[str, Site]
) -> Claim:
    """``z`` through the output projection, and the norms after it, is what attention adds, up to one fixed factor."""
    factors: list[float] = []

    def holds(values: Values) -> str | None:
        wanted = values[result[1]]
        return different(_scaled(through(values[z[1]], *modules), wanted, factors, scaled), wanted)

    return Claim(text, (z[0],), (result[0],), (z[1], result[1]), holds, doubts=(z[0],))


def _scaled(value: Tensor, wanted: Tensor, factors: list[float], scaled: bool) -> Tensor:
    """A value times one fixed factor, where there is one: found by least squares, once, it must do for all probes."""
    if not scaled or value.shape != wanted.shape:
        return value
    if not factors:
        factors.append(float((value.double() * wanted.double()).sum() / value.double().square().sum()))
    return value * factors[0]


def rearranged(text: str, call: Site, z: tuple[str, Site]) -> Claim:
    """``z`` is what the attention call made, with the heads beside each other."""

    def holds(values: Values) -> str | None:
        made, wanted = values[call], values[z[1]]
        if made.dim() == 3 and made.shape[0] != wanted.shape[0]:
            made = made.unflatten(0, (wanted.shape[0], -1))
        if made.dim() != 4 or made.numel() != wanted.numel():
            return f"shapes {tuple(made.shape)} and {tuple(wanted.shape)}"
        options = (made.transpose(1, 2).reshape(wanted.shape), made.reshape(wanted.shape))
        found = [different(option, wanted) for option in options]
        return None if None in found else found[0]

    return Claim(text, (), (z[0],), (call, z[1]), holds)


def attended(text: str, call: Site, sites: dict[str, Site], names: dict[str, str]) -> Claim:
    """The softmax of the scores of queries and keys, times the values, is what the fused call made."""
    whole = call.but(port="input", leaf="")

    def holds(values: Values) -> str | None:
        args, kwargs = values[whole]
        rest = {**dict(zip(_FUSED[3:], args[3:], strict=False)), **{k: v for k, v in kwargs.items() if k in _FUSED[3:]}}
        q, k, v = (values[sites[kind]] for kind in "qkv")
        return different(_by_hand(q, k, v, **rest), values[call])

    needs = (whole, call, *(sites[kind] for kind in "qkv"))
    return Claim(text, tuple(names[kind] for kind in "qkv"), (), needs, holds, calls=(whole,))


_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _by_hand(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    if q.dtype in (torch.float16, torch.bfloat16):  # rounded otherwise than the kernel does: its own word is taken
        return F.scaled_dot_product_attention(q, k, v, **{**rest, "dropout_p": 0.0})
    weights = attention_map(q, k, v, **rest)
    return weights @ (v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3) if rest.get("enable_gqa") else v)


def rows(text: str, pattern: tuple[str, Site]) -> Claim:
    """Rows of the pattern sum to 1, and nothing in it is below 0."""
    # A result and no input: one that was edited sums to anything.
    return Claim(text, (), (pattern[0],), (pattern[1],), lambda values: _rows(values[pattern[1]]))


def weighted(text: str, pattern: tuple[str, Site], v: tuple[str, Site], call: Site) -> Claim:
    """The pattern times the values is what the product made."""

    def holds(values: Values) -> str | None:
        weights, value = values[pattern[1]].to(values[v[1]].dtype), values[v[1]]
        if weights.dim() == value.dim() + 1:  # batch and heads are one dim in the product
            weights = weights.flatten(0, 1)
        return different(weights @ value, values[call])

    return Claim(text, (pattern[0], v[0]), (), (pattern[1], v[1], call), holds)


def _rows(weights: Tensor) -> str | None:
    sums = weights.double().sum(-1)
    if bool((weights < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        return f"rows sum to {float(sums.min()):.3g} and up to {float(sums.max()):.3g}"
    return None


def scored(text: str, q: tuple[str, Site], k: tuple[str, Site], scores: Site) -> Claim:
    """The product of queries and keys is what the scores are made of."""
    return Claim(
        text,
        (q[0], k[0]),
        (),
        (q[1], k[1], scores),
        lambda values: different(values[q[1]] @ values[k[1]].transpose(-1, -2), values[scores]),
    )


def scaled(text: str, name: str, site: Site, lookup: Site, weight: Tensor) -> Claim:
    """The embedding is the rows of its matrix, up to one factor."""

    def holds(values: Values) -> str | None:
        ids, found = values[lookup], values[site]
        ids = ids.args[0] if isinstance(ids, Inputs) else ids
        rows = F.embedding(ids, weight)
        if rows.shape != found.shape:
            return f"shapes {tuple(rows.shape)} and {tuple(found.shape)}"
        factor = (rows.double() * found.double()).sum() / rows.double().square().sum().clamp_min(1e-30)
        return different((rows.double() * factor).to(found.dtype), found)

    return Claim(text, (), (name,), (site, lookup), holds, calls=(lookup,))


def tokenwise(text: str, before: tuple[str, Site], result: tuple[str, Site]) -> Claim:
    """Made from each token alone: where only others change, it stays. Read are two such runs, put side by side."""

    def holds(values: Values) -> str | None:
        shape = values[before[1]][0].shape
        if len(shape) < 3 or shape[1] < 3:
            return "there are less than three tokens: give inputs with several, batch first"
        one, other = (made.reshape(*shape[:2], -1) for made in values[result[1]])
        # The first and the last one: whoever looks only back, or only ahead, sees no others from one of them.
        return different(one[0, 0], other[0, 0]) or different(one[-1, -1], other[-1, -1])

    return Claim(text, (before[0],), (result[0],), (before[1], result[1]), holds)


def one_token(text: str, names: dict[str, str], sites: dict[str, Site], call: Site) -> Claim:
    """Where one token of the queries changes, what attention makes for it does, and nothing else.

    Read are two runs that differ by the token in the middle, side by side.
    """

    def holds(values: Values) -> str | None:
        tokens = values[sites["q"]].one.shape[-2]
        if tokens < 2:
            return "there are less than two tokens: give inputs with several"
        one, other = values[call]
        off = (one.double() - other.double()).abs().transpose(-1, -2).flatten(0, -2).amax(0)
        moved = (off > 1e-3 * off.max()).nonzero().flatten().tolist()
        return None if moved == [tokens // 2] else f"with token {tokens // 2} of {tokens}, {moved} change"

    inputs = tuple(names[kind] for kind in "qkv")
    return Claim(text, inputs, (), (*(sites[kind] for kind in "qkv"), call), holds, doubts=inputs[:2])


def unmoved(text: str, name: str, site: Site) -> Claim:
    """Stays as it is, whatever else changes. Read are two runs, side by side."""
    return Claim(text, (), (name,), (site,), lambda values: different(*values[site]))


def combined(
    text: str,
    experts: tuple[str, Site],
    shared: Site | None,
    modules: list[nn.Module],
    scaled: bool,
    result: tuple[str, Site],
) -> Claim:
    """What the experts make, and what all tokens share, is what the branch adds: past norms, up to one fixed factor."""
    needs = (experts[1], result[1], *([shared] if shared is not None else []))
    factors: list[float] = []

    def holds(values: Values) -> str | None:
        made, wanted = values[experts[1]], values[result[1]]
        if made.numel() != wanted.numel():
            return f"shapes {tuple(made.shape)} and {tuple(wanted.shape)}"
        made = made.reshape(wanted.shape)
        made = made if shared is None else made + values[shared].reshape(wanted.shape)
        return different(_scaled(through(made, *modules), wanted, factors, scaled), wanted)

    return Claim(text, (experts[0],), (result[0],), needs, holds, doubts=(experts[0],))


def routes(text: str, router: tuple[str, Site], chosen: Site, expert: int) -> Claim:
    """Whatever expert has by far the highest score is chosen for every token."""

    def holds(values: Values) -> str | None:
        if bool((values[chosen] == expert).any(-1).all()):
            return None
        return f"expert {expert} was not chosen, whose score is the highest"

    return Claim(text, (router[0],), (), (router[1], chosen), holds)
