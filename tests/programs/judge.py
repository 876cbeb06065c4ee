"""Whether what a session tells of a program is so: bare hooks and finite differences decide.

*Values*: bare hooks that clone. *Gradients*: the score is measured again with a bare hook that adds a small step in a
random direction to what passes, there and back. Such a hook hands on a copy. Where the program's result depends on
that (an old name of overwritten memory is read later), the measure says nothing and the site is skipped.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import BareHooks, Node, differences, freeze, hooks_on
from tests.programs.stage import Ran, Stage, mapped, places_in, quiet, score
from torchhook import edits

STEP = 1e-5
EXACT = 1e-11
PORTS = ("grad", "grad_input", "grad_total")
TORCH_RAISES = (RuntimeError, ValueError, TypeError, NameError, AttributeError, IndexError, KeyError, AssertionError)


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


class Discarded(Exception):
    pass


def judge(source: str, seed: int = 0, only: str = "") -> Verdict:
    """Run a program bare and under sessions; or ``only`` for one kind of what may be wrong."""
    verdict = Verdict()
    try:
        case = Case(source, seed, verdict)
    except Discarded as why:
        verdict.discarded = str(why)
        return verdict
    checks = [case.check_values, case.check_gradients, case.check_edits, case.check_gradient_edits]
    for check in [case.check_gradients] if only.startswith("grad") else checks:
        check()
    return verdict


class Site(NamedTuple):
    name: str
    call: int
    port: str

    def __str__(self) -> str:
        return f"{self.name}#{self.call}:{self.port}"


Seen = dict[Site, list[tuple[str, Tensor, int]]]
"""Tensors that passed, with their places and versions."""

EVERY_CALL = -1
Change = Callable[[Tensor], Tensor]


class Case:
    """A program that torch can run and differentiate, and what is right about it."""

    def __init__(self, source: str, seed: int, verdict: Verdict) -> None:
        self.verdict, self.dice = verdict, random.Random(seed)
        self.directions: dict[Site, dict[str, Tensor]] = {}
        """Where steps go, for each tensor with a gradient in what passes a site."""
        self.totals: dict[Site, dict[str, Tensor]] = {}
        self.written: set[Site] = set()
        """Where what passed is written to afterwards."""
        self.shared: set[Site] = set()
        """Where several tensors that pass lie in the same memory."""
        self._expected: dict[Site, float | None] = {}
        try:
            self.stage = Stage(source)
            self.bare = self.stage.run()
            self._write_down()
        except TORCH_RAISES as error:
            raise Discarded(f"{type(error).__name__}: {str(error)[:80]}") from None
        if "use_reentrant=True" in source:
            self.totals.clear()  # what passes in such a segment is a tensor of its own
        self._check_torch()

    # -- what is right ----------------------------------------------------------------------------------

    def _write_down(self) -> None:
        """One run without checkpoints, in which bare hooks see what passes."""
        seen: Seen = {}
        generator = torch.Generator().manual_seed(self.dice.randrange(2**31))

        def note(site: Site, value: Any) -> None:
            passed = [(place, t) for place, t in _first_places(value) if t.requires_grad]
            if passed:
                self.directions[site] = {place: _direction(t, generator) for place, t in passed}
            seen[site] = [(place, t, t._version) for place, t in passed]

        with contextlib.ExitStack() as hooks, quiet(), self.stage.tape.running("write"):
            for name in self.stage.modules:
                for port in ("grad", "grad_input"):
                    site = Site(name, 0, port)
                    hooks.enter_context(_hooked(self.stage, site, lambda v, k, s=site: note(s._replace(call=k), v)))
            outputs = [t for _, t in places_in(self.stage.model(*self.stage.arguments()))]
            held = [t.detach().clone() for t in outputs]
            self._take_totals(score(outputs), seen)
            self.written = {site for site, found in seen.items() if any(t._version != v for _, t, v in found)}
            self.shared = {site for site, found in seen.items() if _share_memory([t for _, t, _ in found])}
        if any(not torch.equal(a, b) for a, b in zip(self.bare.outputs, held, strict=True)):
            raise Discarded("a checkpoint changes the result")

    def _take_totals(self, loss: Tensor, seen: Seen) -> None:
        """Gradients of the very tensors that passed, where nobody wrote to them later."""
        whole = {
            s: found for s, found in seen.items() if s.port == "grad" and all(t._version == v for _, t, v in found)
        }
        every = [t for found in whole.values() for _, t, _ in found]
        if not loss.requires_grad:
            raise Discarded("no gradients")
        grads = iter(torch.autograd.grad(loss, every, allow_unused=True) if every else ())
        for site, found in whole.items():
            named = {place: next(grads) for place, _, _ in found}
            self.totals[site._replace(port="grad_total")] = {p: g for p, g in named.items() if g is not None}

    def _check_torch(self) -> None:
        """Discard what torch differentiates wrongly without a word: a checkpoint of what is overwritten, say."""
        if any(not torch.equal(p, self.stage.built[n]) for n, p in self.stage.model.named_parameters()):
            raise Discarded("a parameter is overwritten")
        found = [*self.bare.outputs, *self.bare.gradients.values()]
        if not all(bool(t.isfinite().all()) and (not t.numel() or t.abs().max() < 1e4) for t in found):
            raise Discarded("large")
        generator = torch.Generator().manual_seed(1)
        steps = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in self.bare.gradients.items()}

        def moved(by: float) -> float:
            before = {name: p.detach().clone() for name, p in self.stage.model.named_parameters()}

            def move(args: tuple[Tensor, ...]) -> None:
                for name, leaf in self.stage.leaves(args).items():
                    if name in steps:
                        leaf += by * steps[name]

            try:
                return self.stage.score(move)
            finally:
                with torch.no_grad():
                    for name, p in self.stage.model.named_parameters():
                        p.copy_(before[name])

        still = moved(0.0)
        if abs(still - self.bare.score) > EXACT * (1 + abs(still)):
            raise Discarded("what has no gradient shares memory")
        derivative = sum((g * steps[name]).sum().item() for name, g in self.bare.gradients.items())
        if not _close((moved(STEP) - moved(-STEP)) / (2 * STEP), derivative):
            raise Discarded("torch's gradient is not the derivative")

    @contextlib.contextmanager
    def _changed(self, site: Site, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
        """A bare hook that changes the tensors with gradients that pass a site."""

        def hook(value: Any, call: int) -> Any:
            if site.call not in (EVERY_CALL, call):
                return None
            directions = self.directions.get(site._replace(call=call), {})
            known = {id(t): place for place, t in _first_places(value)}
            return mapped(lambda t: change(known[id(t)], t) if known[id(t)] in directions else t, value)

        with _hooked(self.stage, site, hook):
            yield

    def _takes_a_copy(self, site: Site, mode: str = "plain") -> bool:
        """Whether the program goes on as before when a copy of what passes is handed on.

        Where it writes to what passed, nobody may read the original any more either: under its old name, it would
        show what was written.
        """
        calls = [s for s in self.directions if s[::2] == site[::2] and site.call in (EVERY_CALL, s.call)]
        written = not self.written.isdisjoint(calls)
        if written and not self.shared.isdisjoint(calls):
            return False
        try:
            with self._changed(site, lambda place, t: t.clone()):
                if _run_differences(self.bare, self.stage.run(mode)):
                    return False
            with self._changed(site, _spoiled):
                return not written or abs(self.stage.score() - self.bare.score) < EXACT * (1 + abs(self.bare.score))
        except RuntimeError:
            return False

    def _derivative(self, site: Site) -> float | None:
        """How the score changes with what passes a site, in its direction; ``None`` at a kink."""

        def moved(by: float) -> float:
            with self._changed(site, lambda place, t: t + by * self.directions[site][place]):
                return self.stage.score()

        plus, minus = moved(STEP), moved(-STEP)
        there, back = (plus - self.bare.score) / STEP, (self.bare.score - minus) / STEP
        return None if abs(there - back) > 1e-2 * (1 + abs(there)) else (plus - minus) / (2 * STEP)

    def expected(self, site: Site) -> float | None:
        """The derivative by what passes a site, where it can be measured."""
        if site not in self._expected:
            found = self._derivative(site) if self._takes_a_copy(site) else float("nan")
            self._expected[site] = None if found != found else found
            kind = "at a kink" if found is None else "skipped" if found != found else "compared"
            self.verdict.counts[f"{site.port} {kind}"] += 1
        return self._expected[site]

    # -- what a session says --------------------------------------------------------------------------

    def complain(self, kind: str, site: object, text: str) -> None:
        self.verdict.wrong.append(Wrong(kind, str(site), text))

    def run_in(self, what: str, session: Any, expected: Ran) -> Any:
        """Run the program in a session, which must not be noticed."""
        with quiet():
            try:
                with session as rec:
                    ran = self.stage.run()
            except Exception as error:
                self.complain("raises", what, f"{type(error).__name__}: {error}")
                return None
        if hooks_on(self.stage.model):
            self.complain("residue", what, "hooks are left on the model")
        for line in _run_differences(expected, ran)[:1]:
            self.complain("disturbed", what, line)
        return rec

    def check_values(self) -> None:
        """What is captured is what bare hooks cloned."""
        with BareHooks(self.stage.model) as hooks, quiet(), self.stage.tape.running("plain"):
            self.stage.model(*self.stage.arguments())
        sites = [f"{name}:{port}" for name in self.stage.modules for port in ("output", "input")]
        rec = self.run_in("values", th.capture(self.stage.model, *sites), self.bare)
        for name in self.stage.modules if rec is not None else ():
            self._compare_values(f"{name}:output", hooks.outputs.get(name, []), rec)
            self._compare_values(
                f"{name}:input", [_as_passed(*v.parts.values()) for v in hooks.inputs.get(name, [])], rec
            )

    def _compare_values(self, site: str, bare: list[Any], rec: Any) -> None:
        found = [freeze(record.value) for record in rec.records(site)] if site in rec else []
        if len(found) != len(bare):
            self.complain("value", site, f"{len(bare)} calls, {len(found)} were recorded")
        for call, (one, two) in enumerate(zip(bare, found, strict=False)):
            self.verdict.counts["values compared"] += 1
            for line in differences(one, two)[:1]:
                self.complain("value", f"{site} of call {call}", line)

    def check_gradients(self) -> None:
        """In sessions for one port, for all, for some, and for one site alone."""
        by_port = {port: [f"{name}:{port}" for name in self.stage.modules] for port in PORTS}
        every = [site for sites in by_port.values() for site in sites]
        some = [site for site in every if self.dice.random() < 0.2]
        asked = {**by_port, "all": every, "some": some or every[:1], "one": [self.dice.choice(every)]}
        for what, sites in asked.items():
            rec = self.run_in(f"gradients, {what}", th.capture(self.stage.model, *sites), self.bare)
            if rec is not None:
                for site in [s for s in self.directions if f"{s.name}:{s.port}" in sites]:
                    self._compare_gradient(site, rec, what)
                for site in [s for s in self.totals if f"{s.name}:{s.port}" in sites]:
                    self._compare_total(site, rec, what)

    def _compare_gradient(self, site: Site, rec: Any, what: str) -> None:
        expected, grads = self.expected(site), _recorded(rec, site)
        steps = self.directions[site]
        found = sum((grads[place] * step).sum().item() for place, step in steps.items() if place in grads)
        if expected is not None and not _close(expected, found):
            self.complain(site.port, site, f"asked for {what}: {found:.6f}, the derivative is {expected:.6f}")

    def _compare_total(self, site: Site, rec: Any, what: str) -> None:
        grads = _recorded(rec, site)
        self.verdict.counts["grad_total compared"] += 1
        for place, expected in self.totals[site].items():
            found = grads.get(place, torch.zeros_like(expected))
            if _differ(expected, found, 1e-9):
                self.complain(site.port, site, f"asked for {what}: {_first(found)}…, expected {_first(expected)}…")

    def check_edits(self) -> None:
        """An edit does what a bare hook does that returns the same."""
        sites = sorted({site._replace(call=EVERY_CALL) for site in self.directions})
        for site in self.dice.sample(sites, min(2, len(sites))):
            port = "input" if site.port == "grad_input" else "output"

            def larger(value: Any) -> Any:
                return mapped(lambda t: t * 1.25, value)

            try:
                with _hooked(self.stage, site, lambda value, call: larger(value)):
                    expected = self.stage.run()
            except RuntimeError:
                continue
            self.verdict.counts["edits compared"] += 1
            self.run_in(
                f"edit {site.name}:{port}", th.edit(self.stage.model, {f"{site.name}:{port}": larger}), expected
            )

    def check_gradient_edits(self) -> None:
        """A gradient that is scaled counts as much less from there on; at one site, and at several."""
        sites = sorted({site._replace(call=EVERY_CALL) for site in self.directions})
        chosen = [s for s in self.dice.sample(sites, min(4, len(sites))) if self._takes_a_copy(s, "off")]
        for several in [*([site] for site in chosen[:2]), *([chosen] if len(chosen) > 1 else [])]:
            factors = {site: self.dice.choice([0.0, 0.5, -2.0]) for site in several}
            with contextlib.ExitStack() as hooks:
                for site, factor in factors.items():
                    hooks.enter_context(self._changed(site, lambda place, t, k=factor: Scaled.apply(t, k)))
                expected = self.stage.run()
            if _run_differences(self.bare, expected, gradients=False):
                continue  # all those copies together
            self.verdict.counts["gradient edits compared"] += 1
            asked = {f"{site.name}:{site.port}": edits.scale(factor) for site, factor in factors.items()}
            self.run_in(
                f"edit { ({s: e.__name__ for s, e in asked.items()}) }", th.edit(self.stage.model, asked), expected
            )


class Scaled(torch.autograd.Function):
    """A copy whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@torch.no_grad()
def _spoiled(place: str, tensor: Tensor) -> Tensor:
    """A copy; whoever reads the original from here on reads something else."""
    copy = tensor.clone()
    tensor.add_(1.0)
    return copy


def _share_memory(tensors: list[Tensor]) -> bool:
    return len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors)


# -- what passes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hooked(stage: Stage, site: Site, change: Callable[[Any, int], Any]) -> Iterator[None]:
    """A bare hook at a module's exit, or at its entrance; ``change(value, call)`` replaces the value."""
    calls = iter(range(10**6))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output, next(calls))

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        alone = len(args) == 1 and not kwargs
        new = change(args[0] if alone else (args, kwargs), next(calls))
        return None if new is None else ((new,), {}) if alone else new

    module = stage.modules[site.name]
    if site.port == "grad_input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def _as_passed(args: Any, kwargs: Any) -> Any:
    """The frozen arguments of a call as they are recorded: one positional argument is itself."""
    if len(args.parts) == 1 and not kwargs.parts:
        return args.parts["0"]
    return Node("Inputs", {"args": args, "kwargs": kwargs})


def _first_places(value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a value, each once, where it is first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for place, tensor in places_in(value):
        found.setdefault(id(tensor), (place, tensor))
    return list(found.values())


def _recorded(rec: Any, site: Site) -> dict[str, Tensor]:
    """The gradients of one call, by their places."""
    address = f"{site.name}:{site.port}"
    for record in rec.records(address) if address in rec else ():
        if record.call == site.call:
            return dict(places_in(record.value))
    return {}


def _direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Nowhere where the value is zero: that is where the kinks are."""
    drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return drawn * (tensor.detach() != 0)


# -- numbers ------------------------------------------------------------------------------------------------------


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-5 * (1 + abs(one))


def _first(tensor: Tensor) -> list[float]:
    return [round(x, 6) for x in tensor.flatten()[:4].tolist()]


def _run_differences(expected: Ran, found: Ran, gradients: bool = True) -> list[str]:
    if len(expected.outputs) != len(found.outputs):
        return ["another output"]
    lines = [
        f"output {i}" for i, (a, b) in enumerate(zip(expected.outputs, found.outputs, strict=True)) if _differ(a, b)
    ]
    for name in {**expected.gradients, **found.gradients} if gradients else ():
        a, b = expected.gradients.get(name), found.gradients.get(name)
        zero = torch.zeros((), dtype=torch.float64)
        if _differ(zero if a is None else a, zero if b is None else b):
            shown = [None if t is None else _first(t) for t in (b, a)]
            lines.append(f"the gradient of {name} is {shown[0]}…, expected {shown[1]}…")
    lines += [f"buffer {name}" for name, b in expected.buffers.items() if not torch.equal(b, found.buffers[name])]
    return lines


def _differ(one: Tensor, two: Tensor, by: float = EXACT) -> bool:
    one, two = torch.broadcast_tensors(one, two) if 0 in (one.dim(), two.dim()) else (one, two)
    return one.shape != two.shape or not torch.allclose(one, two, rtol=by, atol=by)
