"""What is right about a program, found out without the library: by bare hooks and finite differences.

The derivative by what passes a site is measured with a bare hook that adds a small step in a random direction to it,
there and back. Such a hook hands on a copy. Where the program's result depends on that (an old name of overwritten
memory is read later), the measure says nothing, and the site is skipped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.programs.stage import EXACT, Stage, close, on_graph, places_in, quiet, replaced, run_differences, score

STEP = 1e-5
TORCH_RAISES = (RuntimeError, ValueError, TypeError, NameError, AttributeError, IndexError, KeyError, AssertionError)
EVERY_CALL = -1


class Discarded(Exception):
    """Torch itself has nothing to say about the program."""


class Site(NamedTuple):
    name: str
    call: int
    port: str

    def __str__(self) -> str:
        return f"{self.name}#{self.call}:{self.port}"


Seen = dict[Site, list[tuple[str, Tensor, int, Any]]]
"""Tensors that passed, with their places, their versions and the steps that had made them."""


class Truth:
    """What is right about a program that torch can run and differentiate."""

    def __init__(self, source: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._generator = torch.Generator().manual_seed(seed)
        self.directions: dict[Site, dict[str, Tensor]] = {}
        """Where steps go, for each tensor with a gradient in what passes a site."""
        self.again: dict[tuple[Site, str], list[str]] = {}
        """Where else a tensor is that enters a module: it enters once. What leaves in two places, leaves twice."""
        self.totals: dict[Site, dict[str, Tensor]] = {}
        self.written: set[Site] = set()
        """Where the module wrote to what passes, or someone else does afterwards."""
        self.aged: set[Site] = set()
        """Where what passes was written to before."""
        self.silent: set[Site] = set()
        """Where what passed is written to behind the back of autograd."""
        self.odd: set[Site] = set()
        """Where a tensor passes that says it needs a gradient, and has no step that it came from."""
        self.new: set[Site] = set()
        """Where what passes was made by the module."""
        self.shared: set[Site] = set()
        """Where several tensors that pass lie in the same memory, or one of them is there twice."""
        self._expected: dict[Site, float | None] = {}
        self._copied: dict[tuple[Site, str], bool] = {}
        try:
            self.stage = Stage(source)
            self.bare = self.stage.run()
            self._write_down()
        except TORCH_RAISES as error:
            raise Discarded(f"{type(error).__name__}: {str(error)[:80]}") from None
        self.reentrant, self.keeps = "use_reentrant=True" in source, "self.kept" in source
        if self.reentrant:
            self.totals.clear()  # what passes in such a segment is a tensor of its own
            if self.stage.tape.odd:
                raise Discarded("in a segment, such a view says something else than outside")
        self._check_torch()

    def _write_down(self) -> None:
        """One run without checkpoints, in which bare hooks see what passes."""
        seen: Seen = {}
        entered: dict[Site, dict[int, int]] = {}

        def note(site: Site, value: Any) -> None:
            passed = [(place, t) for place, t in _parts(value, site) if on_graph(t)]
            if any(t.requires_grad and not on_graph(t) for _, t in places_in(value)):
                self.odd.add(site)
            if not torch.is_grad_enabled():
                passed = [(place, t) for place, t in passed if not t.is_leaf]
            if passed:
                self.directions[site] = {place: _direction(t, self._generator) for place, t in passed}
            for place, t in passed if site.port == "grad_input" else ():
                self.again[site, place] = [other for other, u in places_in(value) if u is t and other != place]
            seen[site] = [(place, t, t._version, _step(t)) for place, t in passed]
            if site.port == "grad_input":
                entered[site._replace(port="grad")] = {_memory(t): t._version for _, t in places_in(value)}
                return
            if any(entered[site].get(_memory(t), t._version) != t._version for _, t in passed):
                self.written.add(site)
            if not any(_memory(t) in entered[site] for _, t in passed):
                self.new.add(site)

        with contextlib.ExitStack() as hooks, quiet(), self.stage.tape.running("write"):
            for name in self.stage.modules:
                for port in ("grad_input", "grad"):
                    site = Site(name, 0, port)
                    hooks.enter_context(hooked(self.stage, site, lambda v, k, s=site: note(s._replace(call=k), v)))
            outputs = [t for _, t in places_in(self.stage.model(*self.stage.arguments()))]
            held = [t.detach().clone() for t in outputs]
            self._take_totals(score(outputs), seen)
        for site, found in seen.items():
            if any(t._version != version for _, t, version, _ in found):
                self.written.add(site)
            if any(_written_silently(t, version, step) for _, t, version, step in found):
                self.silent.add(site)
            places = sum(1 + len(self.again.get((site, place), ())) for place, _, _, _ in found)
            if len({_memory(t) for _, t, _, _ in found}) < places:
                self.shared.add(site)
        if any(not torch.equal(a, b) for a, b in zip(self.bare.outputs, held, strict=True)):
            raise Discarded("a checkpoint changes the result")

    def _take_totals(self, loss: Tensor, seen: Seen) -> None:
        """Gradients of the very tensors that passed, where nobody wrote to them later."""
        left = {site: found for site, found in seen.items() if site.port == "grad"}
        whole = {site: found for site, found in left.items() if all(t._version == v for _, t, v, _ in found)}
        every = [t for found in whole.values() for _, t, _, _ in found]
        if not loss.requires_grad:
            raise Discarded("no gradients")
        grads = iter(torch.autograd.grad(loss, every, allow_unused=True) if every else ())
        for site, found in whole.items():
            named = {place: next(grads) for place, _, _, _ in found}
            if any(version for _, _, version, _ in found):
                self.aged.add(site._replace(port="grad_total"))
            if len({id(t) for _, t, _, _ in found}) == len(found):
                self.totals[site._replace(port="grad_total")] = {p: g for p, g in named.items() if g is not None}

    def _check_torch(self) -> None:
        """Discard what torch differentiates wrongly without a word: a checkpoint of what is overwritten, say."""
        if any(not torch.equal(p, self.stage.built[n]) for n, p in self.stage.model.named_parameters()):
            raise Discarded("a parameter is overwritten")
        found = [*self.bare.outputs, *self.bare.gradients.values()]
        if not all(bool(t.isfinite().all()) and (not t.numel() or t.abs().max() < 1e4) for t in found):
            raise Discarded("large")
        leaves = self.stage.leaves(self.stage.arguments())
        steps = {n: torch.randn(t.shape, generator=self._generator, dtype=t.dtype) for n, t in leaves.items()}

        def moved(by: float) -> float:
            def move(args: tuple[Tensor, ...]) -> None:
                for name, leaf in self.stage.leaves(args).items():
                    leaf += by * steps[name]

            try:
                return self.stage.score(move)
            finally:
                self.stage.restore()

        still = moved(0.0)
        if abs(still - self.bare.score) > EXACT * (1 + abs(still)):
            raise Discarded("what has no gradient shares memory")
        derivative = sum((g * steps[name]).sum().item() for name, g in self.bare.gradients.items())
        if not close((moved(STEP) - moved(-STEP)) / (2 * STEP), derivative):
            raise Discarded("torch's gradient is not the derivative")

    @contextlib.contextmanager
    def changed(self, site: Site, change: Callable[[str, Tensor], Tensor], spoil: bool = False) -> Iterator[None]:
        """A bare hook that changes the tensors with gradients that pass a site, and may spoil the original ones."""

        def hook(value: Any, call: int) -> Any:
            if site.call not in (EVERY_CALL, call):
                return None
            directions = self.directions.get(site._replace(call=call), {})
            known: dict[int, Tensor] = {}

            def changed(place: str, tensor: Tensor) -> Tensor:
                if site.port == "grad_input" and id(tensor) in known:
                    return known[id(tensor)]
                # A recomputed call has a number that no other has.
                known[id(tensor)] = tensor
                if place in directions or tensor.requires_grad:
                    known[id(tensor)] = change(place, tensor)
                return known[id(tensor)]

            new = replaced(changed, value)
            if spoil:
                with torch.no_grad():
                    for place, tensor in _parts(value, site):
                        if place in directions:
                            tensor.add_(torch.arange(tensor.numel()).cos().view(tensor.shape))
            return new

        with hooked(self.stage, site, hook):
            yield

    def takes_a_copy(self, site: Site, mode: str = "plain") -> bool:
        """Whether the program goes on as before when a copy of what passes is handed on.

        Where it writes to what passed, nobody may read the original any more either: under its old name, it would
        show what was written. What a module made itself counts under every name that it has given it.
        """
        if (site, mode) not in self._copied:
            self._copied[site, mode] = self._tries_a_copy(site, mode)
        return self._copied[site, mode]

    def _tries_a_copy(self, site: Site, mode: str) -> bool:
        calls = [s for s in self.directions if s[::2] == site[::2] and site.call in (EVERY_CALL, s.call)]
        if site.call == EVERY_CALL and not all(self.takes_a_copy(call) for call in calls):
            return False
        written = not self.written.isdisjoint(calls)
        if written and (self.reentrant or not (self.shared | self.silent).isdisjoint(calls)):
            return False
        if written and self.keeps and site.port == "grad_input":
            return False  # who knows by which name
        originals: list[tuple[Tensor, int]] = []

        def copied(place: str, tensor: Tensor) -> Tensor:
            originals.append((tensor, tensor._version))
            return tensor.clone()

        try:
            with self.changed(site, copied):
                if run_differences(self.bare, self.stage.run(mode)):
                    return False
            if any(tensor._version != version for tensor, version in originals):
                return False  # under its old name, and the new one would have shown it
            return not (written or not self.new.isdisjoint(calls)) or self._never_reads_again(site)
        except RuntimeError:
            return False

    def _never_reads_again(self, site: Site) -> bool:
        """Whether nobody reads what passed a site but those who were handed it."""
        try:
            with self.changed(site, lambda place, t: t.clone(), spoil=True):
                return abs(self.stage.score() - self.bare.score) < EXACT * (1 + abs(self.bare.score))
        finally:
            self.stage.restore()

    def _derivative(self, site: Site) -> float | None:
        """How the score changes with what passes a site, in its direction; ``None`` at a kink."""

        def moved(by: float) -> float:
            with self.changed(site, lambda place, t: t + by * self.directions[site][place]):
                return self.stage.score()

        def slopes(step: float) -> tuple[float, float]:
            there, back = moved(step), moved(-step)
            return (there - self.bare.score) / step, (self.bare.score - back) / step

        # What bends looks straight from near enough; a kink does not, and one close by may be stepped over at first.
        for step in (STEP, STEP / 10, STEP / 100):
            there, back = slopes(step)
            if abs(there - back) <= 1e-5 * (1 + abs(there)):
                return (there + back) / 2
        return None

    def expected(self, site: Site) -> float | None:
        """The derivative by what passes a site, where it can be measured."""
        if site not in self._expected:
            found = self._derivative(site) if self.takes_a_copy(site) else float("nan")
            self._expected[site] = None if found != found else found
            kind = "at a kink" if found is None else "skipped" if found != found else "compared"
            self.counts[f"{site.port} {kind}"] += 1
        return self._expected[site]


# -- what passes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hooked(stage: Stage, site: Site, change: Callable[[Any, int], Any]) -> Iterator[None]:
    """A bare hook at a module's exit or entrance: what ``change(value, call)`` returns takes the value's place."""
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


def _parts(value: Any, site: Site) -> list[tuple[str, Tensor]]:
    """The tensors of a value and where they are; of one that enters a module twice, where it is first."""
    if site.port == "grad":
        return list(places_in(value))
    found: dict[int, tuple[str, Tensor]] = {}
    for place, tensor in places_in(value):
        found.setdefault(id(tensor), (place, tensor))
    return list(found.values())


def _direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Nowhere where the value is zero: that is where the kinks are."""
    drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return drawn * (tensor.detach() != 0)


def _step(tensor: Tensor) -> Any:
    """The step of autograd that made a tensor's memory what it is."""
    return (tensor if tensor._base is None else tensor._base).grad_fn


def _written_silently(tensor: Tensor, version: int, step: Any) -> bool:
    """Whether a tensor was written to more often than autograd knows."""
    now = _step(tensor)
    for _ in range(tensor._version - version):
        if now is None or now is step:
            return True
        now = now.next_functions[0][0] if now.next_functions else None
    return now is not step


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
