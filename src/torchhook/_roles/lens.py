"""``lens``: what the model would say after each block, through its own final norm, head and soft cap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchhook._core import naming
from torchhook._core.index import unwrapped
from torchhook._recording.lenses import Lens
from torchhook._recording.records import Recording
from torchhook._roles import probe, tail
from torchhook._roles.names import roles
from torchhook._roles.table import Roles
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import AmbiguousCallError, MissingRecordError, SelectorError


def lens(
    model: nn.Module,
    rec: Recording,
    *,
    inputs: Any = None,
    top: int = 5,
    tokenizer: Any = None,
) -> Lens:
    """What the model would say if it stopped at each value of the stream that was recorded.

    >>> import torch
    >>> from torchhook import capture, roles
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.ff = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ...     def forward(self, x):
    ...         return x + self.ff(x)
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(Block(), Block()), nn.LayerNorm(4), nn.Linear(4, 9))
    >>> ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> names = roles(model, ids)
    >>> with torch.no_grad(), capture(model, "@resid_post.*") as rec:
    ...     logits = model(ids)
    >>> found = lens(model, rec, inputs=ids)
    >>> torch.equal(found["@resid_post.1"], logits)
    True

    The operations between the last block and the logits are written down while the model runs, and run again on each
    value: whatever the model does there. That the last one gives the model's own logits is shown first, or the lens is
    refused.

    Args:
        model: The model that the recording was made with. It, and the process, are left as they were.
        rec: Holds values of the stream: ``th.capture(model, "@resid_post.*")``, or any of ``"@resid_*"``. Several calls
            are joined as ``rec.cat`` joins them: the steps of a generation on their tokens, batches on their rows.
        inputs: What the model is called with, to see what it does after the last block. A model of transformers needs
            none.
        top: How many tokens are kept for each position; the logits themselves are made when they are asked for.
        tokenizer: Names tokens: anything with ``decode``, or a function of a token's number.
    """
    if not isinstance(rec, Recording):
        raise TypeError(f"lens takes a model and a recording, found {type(rec).__name__}: th.capture(…) makes one.")
    root = unwrapped(model)
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top={top!r}: give a positive number, how many tokens are kept for each position.")
    way = "give them, th.lens(model, rec, inputs=…)"
    arguments = probe.made_for(root, way) if inputs is None else probe.given(inputs)
    known = naming.known(root)
    names = known if isinstance(known, Roles) else roles(model, arguments)
    prefix, last = _last(names)
    if "logits" not in names and "logits" not in names.refused:
        raise SelectorError(
            "no lens: where the logits are is not known. Name them: th.roles(model, table={'@logits': address, …})."
        )
    logits = names["logits"]
    through = tail.written(root, _probes(arguments), names.sites[f"{prefix}resid_post.{last}"], logits)
    sites = _recorded(names, rec, prefix, last)

    def logits_of(site: str) -> Tensor:
        return through(_value(rec, site))

    return Lens(sites, logits_of, top, _named(tokenizer), _addresses(names, sites))


def _addresses(names: Roles, sites: list[str]) -> dict[str, str]:
    """What the sites are called in the model itself, where a module's output is one."""
    found: dict[str, str] = {}
    for name in sites:
        site = names.sites.get(name.removeprefix("@"))
        if site is None:
            continue
        place = site.place
        found[str(place)] = name
        if place.op is None and place.port == "output":
            found[place.path] = name  # also where the value is one of several that it returns
    return found


def _last(names: Roles) -> tuple[str, int]:
    """The stack that logits are made from, which runs last, and its last block."""
    posts = [name for name in names.sites if name.split(".")[-2:-1] == ["resid_post"]]
    if not posts:
        why = next((why for name, why in names.refused.items() if "resid_post" in name), "there are no blocks.")
        raise SelectorError(f"no lens: the stream of this model is not known: {why}")
    head, _, number = posts[-1].rpartition(".")
    return head.removesuffix("resid_post"), int(number)


def _recorded(names: Roles, rec: Recording, prefix: str, last: int) -> list[str]:
    """The values of the stream that a recording holds, in the order of the model; what has two names comes once."""
    order = [f"@{prefix}resid_{kind}.{i}" for i in range(last + 1) for kind in ("pre", "mid", "mid_cross", "post")]
    found = [name for name in order if name in rec]
    if not found:
        raise MissingRecordError(
            f"nothing of the stream was recorded, only {', '.join(rec.keys()[:4]) or 'nothing'}: capture "
            f"'@{prefix}resid_post.*'."
        )
    first: dict[str, str] = {}
    for name in found:
        site = names.sites.get(name.removeprefix("@"))
        first.setdefault(str(site if site is not None else name), name)
    return [name for name in found if name in first.values()]


def _value(rec: Recording, site: str) -> Any:
    """The value of a site; of several calls, one sequence or all of their rows."""
    records = rec.records(site)
    if len(records) == 1:
        return records[0].value
    try:
        return rec.cat(site, dim=1 if any(record.step is not None for record in records) else 0)
    except ValueError as error:
        every = f"{site.rpartition('.')[0]}.*"
        raise AmbiguousCallError(
            f"no lens: the {len(records)} records of {site!r} are not one value. Give the lens one pass over the whole "
            f"text, th.run(model, ids, capture={every!r}), or record calls that go together: {every + '#0'!r}, "
            f"{every + '#1:'!r}."
        ) from error


def _probes(inputs: Inputs) -> list[Inputs]:
    """Inputs of several shapes: what depends on the number of tokens must be found out."""
    shorter = tree.map_tensors(lambda t: t[:1, : max(1, t.shape[1] - 2)] if t.dim() == 2 else t, inputs)
    other = [shorter] if any(t.dim() == 2 for t in tree.tensors(inputs)) else []
    return [inputs, probe.varied(inputs), *other]


def _named(tokenizer: Any) -> Callable[[int], str]:
    if tokenizer is None:
        return str
    decode = getattr(tokenizer, "decode", None)
    if decode is not None:
        return lambda token: str(decode([token]))
    if not callable(tokenizer):
        raise TypeError(f"tokenizer= needs decode, or to be a function of a token, found {type(tokenizer).__name__}.")
    return lambda token: str(tokenizer(token))
