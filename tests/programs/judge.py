"""Whether what sessions say about a program is so: values, gradients and edits against what is right."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import BareHooks, Node, differences, freeze, hooks_on
from tests.programs.stage import Ran, close, differ, first_of, mapped, places_in, quiet, run_differences
from tests.programs.truth import EVERY_CALL, Discarded, Site, Truth, hooked
from torchhook import edits

PORTS = ("grad", "grad_input", "grad_total")


class Wrong(NamedTuple):
    """Something that a session gets wrong."""

    kind: str
    """Which check failed; a shorter program must fail the same."""
    site: str
    text: str


@dataclass
class Verdict:
    discarded: str = ""
    """Why torch itself has nothing to say about the program."""
    wrong: list[Wrong] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def judge(source: str, seed: int = 0, only: str = "") -> Verdict:
    """Run a program bare and under sessions; or ``only`` for one kind of what may be wrong."""
    try:
        judgement = Judgement(Truth(source, seed), seed)
    except Discarded as why:
        return Verdict(str(why))
    checks = [judgement.check_gradients]
    if not only.startswith("grad"):
        checks += [judgement.check_values, judgement.check_edits, judgement.check_gradient_edits]
    for check in checks:
        check()
    return Verdict("", judgement.wrong, judgement.truth.counts)


class Judgement:
    """One program in many sessions."""

    def __init__(self, truth: Truth, seed: int) -> None:
        self.truth, self.dice = truth, random.Random(seed)
        self.wrong: list[Wrong] = []
        model = truth.stage.model
        self.outer = nn.ModuleDict({"p": model}) if self.dice.random() < 0.2 else model
        """What sessions are opened on: the model that runs, or one that it is a part of."""

    def address(self, name: str, port: str) -> str:
        """How a session on the outer model calls a site."""
        return f"{name if self.outer is self.truth.stage.model else f'p.{name}'.rstrip('.')}:{port}"

    def complain(self, kind: str, site: object, text: str) -> None:
        self.wrong.append(Wrong(kind, str(site), text))

    def run_in(self, what: str, session: Any, expected: Ran, alone: bool = True) -> Any:
        """Run the program in a session, which must not be noticed."""
        with quiet():
            try:
                with session as rec:
                    ran = self.truth.stage.run()
            except Exception as error:
                self.complain("raises", what, f"{type(error).__name__}: {error}")
                return None
        if alone:
            self._check_residue(what)
        for line in run_differences(expected, ran)[:1]:
            self.complain("disturbed", what, line)
        return rec

    def _check_residue(self, what: str) -> None:
        model = self.truth.stage.model
        if hooks_on(model) or any(p._backward_hooks for p in model.parameters()):
            self.complain("residue", what, "hooks are left on the model")

    def check_values(self) -> None:
        """What is captured is what bare hooks cloned."""
        with BareHooks(self.truth.stage.model) as hooks, quiet(), self.truth.stage.tape.running("plain"):
            self.truth.stage.model(*self.truth.stage.arguments())
        sites = [self.address(name, port) for name in self.truth.stage.modules for port in ("output", "input")]
        rec = self.run_in("values", th.capture(self.outer, *sites), self.truth.bare)
        for name in self.truth.stage.modules if rec is not None else ():
            self._compare_values(self.address(name, "output"), hooks.outputs.get(name, []), rec)
            inputs = [_as_passed(*frozen.parts.values()) for frozen in hooks.inputs.get(name, [])]
            self._compare_values(self.address(name, "input"), inputs, rec)

    def _compare_values(self, site: str, bare: list[Any], rec: Any) -> None:
        found = [freeze(record.value) for record in rec.records(site)] if site in rec else []
        if len(found) != len(bare):
            self.complain("value", site, f"{len(bare)} calls, {len(found)} were recorded")
        for call, (one, two) in enumerate(zip(bare, found, strict=False)):
            self.truth.counts["values compared"] += 1
            for line in differences(one, two)[:1]:
                self.complain("value", f"{site} of call {call}", line)

    def check_gradients(self) -> None:
        """In sessions for one port, for all, for some, and for one site alone."""
        by_port = {port: [self.address(name, port) for name in self.truth.stage.modules] for port in PORTS}
        every = [site for sites in by_port.values() for site in sites]
        some = [site for site in every if self.dice.random() < 0.2]
        one = self.dice.choice(every)
        # Where the outer model does not run, what is written to is found when the last of the sites runs.
        last = [] if self.outer is self.truth.stage.model else [self.address("", "grad")]
        asked = {**by_port, "all": every, "some": some or every[:1], "one": [one]}
        asked = {what: list(dict.fromkeys([*sites, *last])) for what, sites in asked.items()}
        for what, sites in asked.items():
            rec = self.run_in(f"gradients, {what}", th.capture(self.outer, *sites), self.truth.bare)
            if rec is not None:
                for site in [s for s in self.truth.directions if self.address(s.name, s.port) in sites]:
                    self._compare_gradient(site, rec, what)
                for site in [s for s in self.truth.totals if self.address(s.name, s.port) in sites]:
                    self._compare_total(site, rec, what)

    def _compare_gradient(self, site: Site, rec: Any, what: str, factor: float = 1.0) -> None:
        expected, grads = self.truth.expected(site), self._recorded(rec, site)
        found = [0.0, 0.0]
        for place, step in self.truth.directions[site].items():
            here = [grads[p] for p in (place, *self.truth.again.get((site, place), ())) if p in grads]
            # A tensor that enters twice has its gradient at both places; where one of them is an alias, each its own.
            found[0] += (here[0] * step).sum().item() if here else 0.0
            found[1] += sum({round((grad * step).sum().item(), 9) for grad in here})
        if expected is not None and not any(close(factor * expected, sum_) for sum_ in found):
            kind = site.port if factor == 1.0 else "nested"
            self.complain(kind, site, f"asked for {what}: {found[0]:.6f}, the derivative is {expected:.6f}")

    def _recorded(self, rec: Any, site: Site) -> dict[str, Tensor]:
        """The gradients of one call, by their places."""
        address = self.address(site.name, site.port)
        found = [r.value for r in (rec.records(address) if address in rec else ()) if r.call == site.call]
        if len(found) > 1:
            self.complain("recorded again", site, f"{len(found)} records of one call")
        return dict(places_in(found[0])) if found else {}

    def _compare_total(self, site: Site, rec: Any, what: str) -> None:
        grads = self._recorded(rec, site)
        if what != "grad_total" and (site._replace(port="grad") in self.truth.shared or site in self.truth.aged):
            return  # where there are other names for it, they are other tensors in that session
        self.truth.counts["grad_total compared"] += 1
        for place, expected in self.truth.totals[site].items():
            found = grads.get(place, torch.zeros_like(expected))
            if differ(expected, found, 1e-9):
                self.complain(site.port, site, f"asked for {what}: {first_of(found)}…, expected {first_of(expected)}…")

    def check_edits(self) -> None:
        """An edit does what a bare hook does that returns the same."""
        sites = sorted({site._replace(call=EVERY_CALL) for site in self.truth.directions})
        for site in self.dice.sample(sites, min(2, len(sites))):
            port = "input" if site.port == "grad_input" else "output"

            def larger(value: Any) -> Any:
                return mapped(lambda t: t * 1.25, value)

            try:
                with hooked(self.truth.stage, site, lambda value, call: larger(value)):
                    expected = self.truth.stage.run()
            except RuntimeError:
                continue
            self.truth.counts["edits compared"] += 1
            address = self.address(site.name, port)
            self.run_in(f"edit {address}", th.edit(self.outer, {address: larger}), expected)

    def check_gradient_edits(self) -> None:
        """A gradient that is scaled counts as much less from there on; at one site, and at several."""
        sites = sorted({site._replace(call=EVERY_CALL) for site in self.truth.directions})
        if self.outer is not self.truth.stage.model:  # what is written to after the last site is not found
            sites = [site for site in sites if all(s[::2] != site[::2] for s in self.truth.written)]
        chosen = [s for s in self.dice.sample(sites, min(4, len(sites))) if self.truth.takes_a_copy(s, "off")]
        for several in [*([site] for site in chosen[:2]), *([chosen] if len(chosen) > 1 else [])]:
            self._compare_edits({site: self.dice.choice([0.0, 0.5, -2.0]) for site in several})

    def _compare_edits(self, factors: dict[Site, float]) -> None:
        with contextlib.ExitStack() as hooks:
            for site, factor in factors.items():
                hooks.enter_context(self.truth.changed(site, lambda place, t, k=factor: Scaled.apply(t, k)))
            expected = self.truth.stage.run()
        if run_differences(self.truth.bare, expected, gradients=False):
            return  # all those copies together
        self.truth.counts["gradient edits compared"] += 1
        asked = {self.address(site.name, site.port): edits.scale(factor) for site, factor in factors.items()}
        session = th.edit(self.outer, asked)
        if len(factors) > 1:
            self.run_in(f"edit {asked}", session, expected)
            return
        # A session inside sees what the one outside has made of it.
        with quiet(), session:
            rec = self.run_in(f"edit {asked}, capture", th.capture(self.outer, *asked), expected, alone=False)
        self._check_residue(f"edit {asked}, capture")
        ((site, factor),) = factors.items()
        calls = [s for s in self.truth.directions if s[::2] == site[::2]]
        if rec is not None and len(calls) == 1 and calls[0] not in self.truth.odd:
            # Of several calls, one may be scaled through another.
            self._compare_gradient(calls[0], rec, f"{asked}", factor)


class Scaled(torch.autograd.Function):
    """A copy whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _as_passed(args: Any, kwargs: Any) -> Any:
    """The frozen arguments of a call as they are recorded: one positional argument is itself."""
    if len(args.parts) == 1 and not kwargs.parts:
        return args.parts["0"]
    return Node("Inputs", {"args": args, "kwargs": kwargs})
