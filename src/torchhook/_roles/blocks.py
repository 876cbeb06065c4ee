"""One block: the names of what is in it, the sites that they stand for, and what must hold for them."""

from __future__ import annotations

import itertools

from torchhook._recording.address import Site
from torchhook._roles import attention, claims, experts
from torchhook._roles.branches import Branch, Reader, Step, added, first_use, goes_on, mixes_more, site_of
from torchhook._roles.chain import Block, Chain
from torchhook._roles.findings import Findings
from torchhook._roles.trace import Trace

INSIDE = ("resid_mid", "attn_out", "mlp_out", "q", "k", "v", "z", "pattern", "router", "experts")
_ROLES = {"attn": "attn_out", "cross": "cross_attn_out", "mlp": "mlp_out"}


class BlockNames:
    """Names the parts of block ``i`` of a stack."""

    def __init__(self, trace: Trace, chain: Chain, i: int, found: Findings) -> None:
        self._trace, self._chain, self._i, self._found = trace, chain, i, found
        self._block: Block = chain.blocks[i]

    def name(self, kind: str, i: int | None = None) -> str:
        return f"{self._chain.prefix}{kind}.{self._i if i is None else i}"

    def find(self) -> None:
        reader = Reader(self._trace, self._block)
        steps = reader.steps()
        if not steps:
            what = "no sum" if steps == [] else "more than sums and norms"
            why = f"between what {self._block.node.path!r} takes and what it returns, there is {what}."
            self._refuse(("resid_pre", "resid_post", *INSIDE), why)
            return
        self._outside()
        branches = [(step, branch) for step in steps for branch in step.branches]
        kinds = _kinds(reader, [branch for _, branch in branches], self._chain)
        names = self._stream(reader, steps, kinds)
        parts = {of: [b for (_, b), k in zip(branches, kinds, strict=True) if k == of] for of in _ROLES}
        for kind, role in _ROLES.items():
            self._branch(role, parts[kind], kinds)
        self._sums(steps, names)
        self._tokenwise(reader, steps, names, parts["mlp"], self.name("mlp_out"))
        self._from_outside(reader, steps, names, parts["cross"])
        self._attention(reader, parts["attn"])
        self._experts(reader, parts["mlp"])

    # -- the stream -----------------------------------------------------------------------------

    def _outside(self) -> None:
        """What goes into the block and what comes out of it."""
        block, chain, i = self._block, self._chain, self._i
        entry = block.node.site("input", block.taken[0])
        if i:
            last = chain.blocks[i - 1]
            pre = last.node.site(leaf=last.made[0])
        else:
            before = min(first_use(self._trace, block.taken[1]), block.node.start)
            made = site_of(self._trace, block.taken[1], before)
            # How many operations come before the first block changes with how the model is called.
            pre = entry if made is None or made.op is not None else made
        post = block.node.site(leaf=block.made[0])
        self._found.name(self.name("resid_pre"), pre)
        self._found.name(self.name("resid_post"), post)
        same = f"@{self.name('resid_pre')} = {entry.shown}"
        self._found.claim(claims.equal(same, (self.name("resid_pre"), pre), ("", entry)))
        if i + 1 < len(chain.blocks):
            following = chain.blocks[i + 1]
            entry = following.node.site("input", following.taken[0])
            same = f"@{self.name('resid_post')} = {entry.shown}"
            self._found.claim(claims.equal(same, (self.name("resid_post"), post), ("", entry)))

    def _stream(self, reader: Reader, steps: list[Step], kinds: list[str]) -> list[str]:
        """The names of the stream before, between and after the steps; empty where there is none."""
        first, last = self.name("resid_pre"), self.name("resid_post")
        between = [""] * (len(steps) - 1)
        serial = all(_reads(reader, step, other) for step, other in itertools.pairwise(steps))
        if (
            len(steps) == len(kinds)
            and serial
            and kinds in (["attn", "mlp"], ["other", "mlp"], ["attn", "cross", "mlp"])
        ):
            between = [self.name(kind) for kind in ("resid_mid", "resid_mid_cross")[: len(between)]]
        for name, step in zip(between, steps, strict=False):
            site = site_of(self._trace, step.after, first_use(self._trace, step.after, step.sum.end))
            if name and site is not None:
                self._found.name(name, site)
            elif name:
                self._refuse([name.rpartition(".")[0].removeprefix(self._chain.prefix)], "no site has the sum.")
        if self.name("resid_mid") not in between:
            why = f"the block adds {', '.join(map(_spoken, kinds))}"
            parallel = len(steps) < len(kinds) or not serial
            self._refuse(["resid_mid"], f"{why}{' side by side' if parallel else ''}: nothing lies between.")
        return [first, *between, last]

    def _sums(self, steps: list[Step], names: list[str]) -> None:
        """Claim each sum; those with nothing named between them as one."""
        found, start, parts = self._found, 0, list[Branch]()
        for k, step in enumerate(steps):
            parts += step.branches
            before, after = names[start], names[k + 1]
            if not after or after not in found.sites:
                continue
            tokens = {self._branch_name(part): added(self._trace, part) for part in parts}
            known = {name: site for name, site in tokens.items() if site is not None}
            if len(known) == len(parts) and (len(parts) == 1 or all(s.norm is None for s in steps[start:k])):
                norm = None if step.norm is None else step.norm.module
                terms = {before: found.sites[before], **known}
                text = " + ".join(f"@{name}" if name in found.sites else str(known[name]) for name in terms)
                text = f"@{after} = {text}" if norm is None else f"@{after} = norm({text})"
                found.claim(claims.total(text, terms, (after, found.sites[after]), norm))
                if step.norm is not None:
                    self._post_norm(step, after)
            start, parts = k + 1, []

    def _tokenwise(self, reader: Reader, steps: list[Step], names: list[str], parts: list[Branch], name: str) -> None:
        """What is called a feed-forward part must look at one token of the stream at a time, and so cross-attention."""
        if len(parts) != 1 or name not in self._found.sites:
            return
        # Not what the block returns: that may be the same tensor, written to in place.
        tokens = [reader.root(self._block.taken[1]), *(reader.root(step.after) for step in steps[:-1])]
        read = [n for n, token in zip(names[:-1], tokens, strict=True) if token in parts[0].reads]
        before = [n for n in read if n in self._found.sites]
        if not before:
            self._found.refuse(name, "what it is made from is not known, so that nothing shows it to be tokenwise.")
            return
        text = f"@{name} is made from each token of @{before[-1]} alone"
        sites = self._found.sites
        claim = claims.tokenwise(text, (before[-1], sites[before[-1]]), (name, sites[name]))
        self._found.tokenwise[name] = (before[-1], claim)

    def _post_norm(self, step: Step, after: str) -> None:
        """What stands on the stream must be a norm, and not an activation."""
        assert step.norm is not None
        taken, site = step.norm.site("input"), self._found.sites[after]
        text = f"@{after} = norm of what it takes"
        claim = claims.normalizes(text, step.norm.module, ("", taken), (after, site))
        claim.founds = True
        self._found.claim(claim)

    # -- the branches -----------------------------------------------------------------------------

    def _branch(self, role: str, found: list[Branch], kinds: list[str]) -> None:
        if len(found) == 1:
            site = added(self._trace, found[0])
            if site is not None:
                self._found.name(self.name(role), site)
                self._named[id(found[0])] = self.name(role)
                return
        if role == "cross_attn_out" and not found:
            return
        what = "attention" if "attn" in role else "a feed-forward part"
        some = f"{len(found)} of the branches are" if found else "none of the branches is"
        self._refuse([role], f"{some} {what}: the block adds {', '.join(map(_spoken, kinds))}.")

    def _branch_name(self, branch: Branch) -> str:
        return self._named.get(id(branch), f"branch {id(branch)}")

    @property
    def _named(self) -> dict[int, str]:
        return self._found.branches

    def _attention(self, reader: Reader, branches: list[Branch]) -> None:
        if len(branches) != 1:
            self._refuse(("q", "k", "v", "z", "pattern"), "no branch of the block is attention's, or several are.")
            return
        parts = attention.read(reader, branches[0])
        for kind, why in parts.refused.items():
            self._refuse([kind], why)
        names = {kind: self.name(kind) for kind in parts.sites}
        sites = {kind: self._found.name(names[kind], site) for kind, site in parts.sites.items()}
        out = self.name("attn_out")
        claim = self._found.claim
        if "z" in sites and out in self._found.sites and parts.projection is not None:
            modules = [parts.projection.module, *(node.module for node in parts.after)]
            text = f"@{names['z']} through {parts.projection.path!r} = @{out}"
            z = (names["z"], sites["z"])
            claim(claims.projected(text, modules, parts.scaled, z, (out, self._found.sites[out])))
            if parts.call is not None:
                claim(claims.rearranged(f"@{names['z']} = what {parts.call} made", parts.call, z))
        if (
            parts.call is not None
            and parts.scores is None
            and {"q", "k", "v"} <= sites.keys()
            and "pattern" not in sites
        ):
            text = f"softmax(@{names['q']} @{names['k']}ᵀ) @{names['v']} = {parts.call}"
            claim(claims.attended(text, parts.call, sites, names))
        if "pattern" in sites:
            pattern = (names["pattern"], sites["pattern"])
            claim(claims.rows(f"rows of @{pattern[0]} sum to 1", pattern))
            if "v" in sites and parts.call is not None:
                text = f"@{names['pattern']} @{names['v']} = {parts.call}"
                claim(claims.weighted(text, pattern, (names["v"], sites["v"]), parts.call))
        if parts.scores is not None and {"q", "k"} <= sites.keys():
            text = f"@{names['q']} @{names['k']}ᵀ = {parts.scores}"
            claim(claims.scored(text, (names["q"], sites["q"]), (names["k"], sites["k"]), parts.scores))
            if parts.call is not None and "v" in sites:
                self._one_token(names, sites, parts.call)

    def _one_token(self, names: dict[str, str], sites: dict[str, Site], call: Site) -> None:
        """Of the two factors of the scores, that of which a token changes what is made for it alone is the queries."""
        text = f"a token of @{names['q']} changes nothing in {call} but its own"
        self._found.tokens[names["q"]] = claims.one_token(text, names, sites, call)

    def _from_outside(self, reader: Reader, steps: list[Step], names: list[str], parts: list[Branch]) -> None:
        """What is called cross-attention must have values that stay when the stream changes, and so must its tokens."""
        name = self.name("cross_attn_out")
        found = attention.values(reader, parts[0]) if len(parts) == 1 else None
        if found is None or name not in self._found.sites:
            return
        self._tokenwise(reader, steps, names, parts, name)
        leaf = next(leaf for leaf, token in found[0].inputs if token == found[1])
        start, site = self.name("resid_pre", 0), found[0].site("input", leaf)
        text = f"the values of @{name}, {site}, stay when @{start} changes"
        self._found.outside[name] = start, claims.unmoved(text, name, site)

    def _experts(self, reader: Reader, branches: list[Branch]) -> None:
        parts = experts.read(reader, branches[0]) if len(branches) == 1 else None
        if parts is None:
            self._refuse(("router", "experts"), "no expert is chosen in the feed-forward part (topk is not called).")
            return
        for kind, why in parts.refused.items():
            self._refuse([kind], why)
        names = {kind: self.name(kind) for kind in parts.sites}
        sites = {kind: self._found.name(names[kind], site) for kind, site in parts.sites.items()}
        out = self.name("mlp_out")
        if "experts" in sites and out in self._found.sites:
            text = f"@{names['experts']}{'' if parts.shared is None else f' + {parts.shared}'}"
            text = f"@{out} = {'norm(' * bool(parts.after)}{text}{')' * bool(parts.after)}"
            made, result = (names["experts"], sites["experts"]), (out, self._found.sites[out])
            norms = [node.module for node in parts.after]
            self._found.claim(claims.combined(text, made, parts.shared, norms, parts.scaled, result))
        if "router" in sites and parts.chosen is not None:
            expert = (7 * self._i + 3) % parts.count
            text = f"the highest score in @{names['router']} decides"
            claim = claims.routes(text, (names["router"], sites["router"]), parts.chosen, expert)
            self._found.route(names["router"], expert, claim)

    def _refuse(self, kinds: tuple[str, ...] | list[str], why: str) -> None:
        for kind in kinds:
            self._found.refuse(self.name(kind), why)


def _kind(reader: Reader, branch: Branch, chain: Chain) -> str:
    if branch.attends is not None:
        crosses = attention.crosses(reader, branch, chain)
        if crosses is None or mixes_more(reader, branch) or goes_on(branch):
            return "other"
        return "cross" if crosses else "attn"
    chooses = any(node.name == "topk" for node in branch.calls)
    return "mlp" if branch.contractions >= 2 or chooses else "other"


def _kinds(reader: Reader, branches: list[Branch], chain: Chain) -> list[str]:
    """What each branch is taken for; whether a feed-forward part is one, its claim decides."""
    kinds = [_kind(reader, branch, chain) for branch in branches]
    if kinds.count("mlp") < 2:
        return kinds
    return ["other" if k == "mlp" and _mixes(b) else k for k, b in zip(kinds, branches, strict=True)]


# What mixers without attention do, and feed-forward parts hardly ever.
_ALONG_TOKENS = frozenset({"conv1d", "cumsum", "fft", "rfft", "irfft", "scan", "associative_scan", "roll", "cumprod"})


def _mixes(branch: Branch) -> bool:
    return any(node.name in _ALONG_TOKENS for node in branch.calls)


def _reads(reader: Reader, step: Step, following: Step) -> bool:
    """Whether the branches of a step are made from what the stream is after the step before."""
    here = {reader.root(step.after), reader.root(step.sum.made()[0])}
    return all(here & branch.reads for branch in following.branches)


def _spoken(kind: str) -> str:
    return {"attn": "attention", "cross": "cross-attention", "mlp": "a feed-forward part"}.get(kind, "another branch")
