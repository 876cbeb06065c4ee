"""From a model and a probe to names: read one pass, name what is there, then try all of it."""

from __future__ import annotations

import torch
from torch import nn

from torchhook._roles import claims, ends, probe
from torchhook._roles.blocks import BlockNames
from torchhook._roles.chain import Chain, chains
from torchhook._roles.findings import Findings
from torchhook._roles.proof import Judge, forced
from torchhook._roles.table import Roles
from torchhook._roles.trace import Trace, traced
from torchhook._values.tree import Inputs


def found(model: nn.Module, inputs: Inputs) -> Roles:
    """The names of a model that hold on its inputs, on others like them, and while values are changed."""
    with probe.alone(model) as restore:
        trace = traced(model, inputs)
        named = _named(trace)
        probes = [("", inputs), ("", probe.varied(inputs)), *probe.other_calls(model, inputs)]
        judge = Judge(model, probes, restore, named.sites)
        _try(judge, named)
    refused = dict(named.refused)
    for name in named.sites:
        if name in judge.wrong:
            refused[name] = judge.wrong[name]
        elif name not in judge.tried:
            refused[name] = "nothing could be claimed of it that would show it to be right."
    sites = {name: site for name, site in named.sites.items() if name not in refused}
    result = Roles(sites, refused, type(model).__name__)
    result.times = judge.times
    result.eval_only = {name: judge.eval_only[name] for name in sites if name in judge.eval_only}
    return result


def _named(trace: Trace) -> Findings:
    named = Findings()
    stacks = chains(trace)
    if not stacks:
        named.refuse("resid_post", "no numbered modules of which each takes what the one before it returned.")
    for chain in stacks:
        _claim_embedding(trace, chain, named)
        for i in range(len(chain.blocks)):
            BlockNames(trace, chain, i, named).find()
        _claim_norm(trace, chain, named)
    _claim_logits(trace, named)
    return named


def _take(named: Findings, around: ends.Ends, prefix: str) -> None:
    for kind, site in around.sites.items():
        named.name(prefix + kind, site)
    for kind, why in around.refused.items():
        named.refuse(prefix + kind, why)


def _claim_embedding(trace: Trace, chain: Chain, named: Findings) -> None:
    before, name = ends.Ends(), f"{chain.prefix}embed"
    ends.embedding(trace, chain, before)
    _take(named, before, chain.prefix)
    node = before.lookup
    if node is not None and isinstance(weight := getattr(node.module, "weight", None), torch.Tensor):
        looked_up = node.site("input", node.inputs[0][0])
        named.claim(claims.scaled(f"@{name} = rows of {node.path}.weight", name, named.sites[name], looked_up, weight))


def _claim_logits(trace: Trace, named: Findings) -> None:
    after = ends.Ends()
    ends.logits(trace, after)
    _take(named, after, "")
    if after.result is not None:
        pair = ("logits", after.sites["logits"]), ("", after.result)
        named.claim(claims.equal("@logits = what the model returns", *pair))


def _claim_norm(trace: Trace, chain: Chain, named: Findings) -> None:
    after, name = ends.Ends(), f"{chain.prefix}norm_final"
    ends.final_norm(trace, chain, after)
    _take(named, after, chain.prefix)
    post = f"{chain.prefix}resid_post.{len(chain.blocks) - 1}"
    if after.norm is not None and post in named.sites:
        text = f"@{name} = norm(@{post})"
        pair = (post, named.sites[post]), (name, named.sites[name])
        named.claim(claims.normalizes(text, after.norm.module, *pair))


def _try(judge: Judge, named: Findings) -> None:
    judge.on_inputs(named.claims, _is_boundary)
    judge.in_training(named.claims, _is_boundary)
    kinds: dict[str, list[str]] = {}
    for name in named.sites:
        head, _, number = name.rpartition(".")
        kind = head.rpartition(".")[2] or name
        # What one block returns the next one takes: edited at once, neither would be seen to follow from anything.
        if kind in ("resid_pre", "resid_post"):
            kind += str(int(number) % 2)
        kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        if kind != "router":
            judge.with_edits(names, named.claims)
    judge.tokenwise(named.tokenwise)
    judge.one_token(named.tokens)
    judge.outside(named.outside)
    experts = {name: expert for name, (expert, _) in named.routers.items()}
    judge.with_edits(experts, [claim for _, claim in named.routers.values()], lambda name: forced(experts[name]))
    judge.tried.update(experts)


def _is_boundary(name: str) -> bool:
    """What a block takes and returns is where it is, whatever is wrong inside of it."""
    return ".resid_pre." in f".{name}" or ".resid_post." in f".{name}"
