"""Trying every claim: on several inputs, and while each named value is changed on its way.

A place may hold the right value without being the right place: a copy that nothing is made of. So values are moved at
the very sites that a user will read and edit, and what must follow from the moved value has to follow.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.select import resolve
from torchhook._core.session import Session
from torchhook._core.site_operations import SiteListener
from torchhook._recording.address import Site
from torchhook._roles.claims import Claim, Runs, Values
from torchhook._roles.probe import runs
from torchhook._values.tree import Inputs

Edit = Callable[[Tensor], Tensor]

_TRAINING_RUNS = 3


class Judge:
    """Runs a model on probes, and keeps what was shown to be wrong."""

    def __init__(
        self, model: nn.Module, probes: list[tuple[str, Inputs]], restore: Callable[[], None], sites: Mapping[str, Site]
    ) -> None:
        self._model, self._probes, self._restore = model, probes, restore
        self._index = Index(model)
        self._sites = sites
        self.wrong: dict[str, str] = {}
        """Names that are refused, each with what was tried and what came of it."""
        self.tried: set[str] = set()
        """Names for which something was shown to hold."""
        self.eval_only: dict[str, str] = {}
        """Names that are right in eval mode alone, each with what does not hold while the model trains."""
        self._broken: set[int] = set()
        self._sizes: dict[str, float] = {}
        """How large the largest part is of the sums that a name goes into."""
        self.times: dict[Site, set[int]] = {}
        """How often operations came in a call of their module, of those that names stand for."""
        self._several: set[Site] = set()
        """Sites with more than one value in the latest run."""

    def tokenwise(self, claims: Mapping[str, tuple[str, Claim]]) -> None:
        """Try what is claimed of feed-forward parts, while most tokens of what they are made from change."""
        for name, (before, claim) in claims.items():
            if before in self.wrong:
                self.wrong.setdefault(name, f"{claim.text}: that cannot be shown, because @{before} is refused.")
        tried = {name: pair for name, pair in claims.items() if name not in self.wrong}
        # One stack at a time: what a decoder looks at must not change with its encoder.
        for stack in dict.fromkeys(map(_stack, tried)):
            here = {name: pair for name, pair in tried.items() if _stack(name) == stack}
            befores = list(dict.fromkeys(before for before, _ in here.values()))
            edits = [{name: _with_two_tokens(name, run) for name in befores} for run in ("once", "again")]
            self._side_by_side({name: claim for name, (_, claim) in here.items()}, *edits)

    def one_token(self, claims: Mapping[str, Claim]) -> None:
        """Try what is claimed of queries, while one token of them changes."""
        tried = {name: claim for name, claim in claims.items() if name not in self.wrong}
        # What goes into each block is the same in both runs, so that none changes with those before it.
        still: dict[str, Edit] = {name: _random(name) for name in self._sites if ".resid_pre." in f".{name}"}
        self._side_by_side(tried, still, still | {name: _with_one_token(name) for name in tried})

    def outside(self, claims: Mapping[str, tuple[str, Claim]]) -> None:
        """Try what is claimed of values that do not come from the stream, while all of that changes."""
        for start in dict.fromkeys(start for start, _ in claims.values()):
            tried = {name: claim for name, (s, claim) in claims.items() if s == start and name not in self.wrong}
            self._side_by_side(tried, *({start: _random(f"{start} {run}")} for run in ("once", "again")))

    def _side_by_side(self, claims: Mapping[str, Claim], *edits: Mapping[str, Edit]) -> None:
        """Try claims that read two runs, in which the values of names are changed."""
        if not claims:
            return
        read, probe = list(claims.values()), self._probes[0][1]
        one, other = (
            self._run(probe, read, {self._sites[name]: edit for name, edit in changes.items()}) for changes in edits
        )
        lost = {site for site in one if one[site] is None or other[site] is None}
        values = {site: None if site in lost else Runs(one[site], other[site]) for site in one}
        for name, claim in claims.items():
            if (why := _tested(claim, values)) is not None:
                for doubted in claim.doubts or (name,):
                    self.wrong.setdefault(doubted, f"{claim.text}: that does not hold ({why}).")

    def on_inputs(self, claims: list[Claim], spared: Callable[[str], bool]) -> None:
        """Try the claims as the model is; names that are ``spared`` are not what is doubted where one fails."""
        for how, probe in self._probes if claims else ():
            try:
                values = self._run(probe, claims, {}, self.times)
            except Exception:
                if not how or runs(self._model, probe):
                    raise
                continue  # a way to call it that was ours, not the user's, and is not the model's
            for claim in claims:
                self._measure(claim, values)
                why = _tested(claim, values)
                names = [*claim.inputs, *claim.results]
                # What did not run is at fault alone; what goes with it is only left without this proof.
                absent = [name for name in names if name in self._sites and values.get(self._sites[name]) is None]
                if why is None:
                    self.tried.update(names)
                    continue
                self._broken.add(id(claim))
                if claim.founds:
                    self._refuse_stack(claim, why)
                for name in absent or claim.doubts or names:
                    if not spared(name):
                        self.wrong.setdefault(name, f"{claim.text} does not hold{how and f', called {how}'}: {why}.")

    def in_training(self, claims: list[Claim], spared: Callable[[str], bool]) -> None:
        """Try the sums in training mode, in which some blocks do more: branches are dropped, operations renumbered."""
        sums = [claim for claim in claims if claim.sums and id(claim) not in self._broken]
        times: dict[Site, set[int]] = {}
        # More than once: what is dropped now and then is not dropped each time.
        for seed in range(_TRAINING_RUNS if sums else 0):
            with calling.in_mode(self._model, training=True):
                try:
                    values = self._run(self._probes[0][1], sums, {}, times, seed)
                except Exception:
                    self._restore()
                    if runs(self._model, self._probes[0][1]):
                        raise
                    return  # it need not run so on these inputs
            for claim in sums:
                if any(values[site] is None and site not in self._several for site in claim.needs):
                    continue  # whole layers may be dropped
                if (why := _tested(claim, values)) is not None:
                    for name in (*claim.inputs, *claim.results):
                        if not spared(name):
                            self.eval_only.setdefault(name, f"in training mode, {claim.text} does not hold: {why}.")
        # What is dropped in one block may be dropped in others of its stack, and only was not this time.
        reasons = {name.rpartition(".")[0]: why for name, why in self.eval_only.items()}
        self.eval_only |= {
            name: reasons[kind]
            for name in self._sites
            if (kind := name.rpartition(".")[0]) in reasons and name not in self.eval_only
        }
        other = {Site(site.path, site.op) for name, site in self._sites.items() if name in self.eval_only}
        for place in times.keys() - other:
            self.times.setdefault(place, set()).update(times[place])

    def _measure(self, claim: Claim, values: Values) -> None:
        sizes = [_size(values[site]) for site in claim.needs if isinstance(values[site], Tensor)]
        for name in claim.inputs if claim.sums else ():
            self._sizes[name] = max([self._sizes.get(name, 0.0), *sizes])

    def _refuse_stack(self, claim: Claim, why: str) -> None:
        """What stands on the stream is no norm: then it is no stream of sums, and nothing of it has a standard name."""
        for name in self._sites:
            if "." in name and _stack(name) == _stack(claim.results[0]):
                self.wrong.setdefault(name, f"{claim.text} does not hold: {why}.")

    def with_edits(self, names: Iterable[str], claims: list[Claim], edit: Callable[[str], Edit] | None = None) -> None:
        """Try the claims that these names go into, while their values are changed."""
        names = [name for name in names if name not in self.wrong]
        edited = set(names)
        places = {self._sites[name] for name in names}
        tried = [c for c in claims if edited & set(c.inputs) and id(c) not in self._broken]
        # What is edited itself follows from nothing.
        tried = [c for c in tried if not any(self._sites.get(result) in places for result in c.results)]
        if not tried:
            return
        changes = {self._sites[name]: (edit or self._moved)(name) for name in names}
        values = self._run(self._probes[0][1], tried, changes)
        for claim in tried:
            why = _tested(claim, values)
            for name in edited & set(claim.inputs):
                if why is not None:
                    site = self._sites[name].shown
                    self.wrong.setdefault(name, f"when {site} is changed, {claim.text} does not hold: {why}.")

    def _run(
        self,
        probe: Inputs,
        claims: list[Claim],
        edits: Mapping[Site, Edit],
        times: dict[Site, set[int]] | None = None,
        seed: int | None = None,
    ) -> Values:
        """What is at the sites that claims need; into ``times`` goes how often their operations came."""
        self._restore()
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
        session = Session(self._model, index=self._index, warn=False)
        counting = SiteListener(session.scope)
        if any(site.op is not None for site in (*edits, *(site for claim in claims for site in claim.needs))):
            session.listen(counting)
        for site, edit in edits.items():
            for target in resolve(self._index, site):
                session.edit(target, edit)
        needed = list(dict.fromkeys(site for claim in claims for site in claim.needs))
        targets = resolve(self._index, needed)
        session.record(targets, Keep())
        with session as recording:
            calling.called(self._model, probe.args, probe.kwargs)
        for target in targets:
            if target.site.op is not None and times is not None:
                place, name = Site(target.site.path, target.site.op), target.site.op.partition("(")[0]
                # Of one that has no number, there is one.
                times.setdefault(place, set()).update(counting.totals.get((id(target.module), name), {1}))
        counts = {site: len(recording.all(site)) if site in recording else 0 for site in needed}
        self._several = {site for site, count in counts.items() if count > 1}
        return {site: recording.all(site)[0] if count == 1 else None for site, count in counts.items()}

    def _moved(self, name: str) -> Edit:
        def move(value: Tensor) -> Tensor:
            # As large as what it is added to: by rounding, anything holds for what is small beside it.
            return value + _noise(value, name) * max(_size(value), self._sizes.get(name, 0.0), 1e-3)

        return move


def _stack(name: str) -> str:
    """What the names of one stack begin with."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _size(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())


def _tested(claim: Claim, values: Values) -> str | None:
    missing = [site.shown for site in claim.needs if values[site] is None]
    if missing:
        return f"{missing[0]} did not run exactly once"
    for site in claim.needs:
        value = values[site]
        passed = value if isinstance(value, Runs) else (value,)
        if site not in claim.calls and not all(isinstance(one, Tensor) for one in passed):
            return f"{site.shown} is no tensor, but {type(passed[0]).__name__}"
    try:
        return claim.holds(values)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # shapes that do not go together
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _with_two_tokens(name: str, run: str) -> Edit:
    """Random values of which the first and the last token are the same in every run, and the others are not."""

    def change(value: Tensor) -> Tensor:
        same, others = (_noise(value, text) for text in (name, f"{name} {run}"))
        if value.dim() > 1:
            others[0, 0], others[-1, -1] = same[0, 0], same[-1, -1]
        return others

    return change


def _random(name: str) -> Edit:
    """Random values, the same in every run."""
    return lambda value: _noise(value, name)


def _with_one_token(name: str) -> Edit:
    """As it is, but for the token in the middle, which is random."""

    def change(value: Tensor) -> Tensor:
        made, token = value.clone(), value.shape[-2] // 2
        made[..., token, :] = _noise(made[..., token, :], name)
        return made

    return change


def _noise(value: Tensor, text: str) -> Tensor:
    seed = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    # On the CPU, where every device gets the same numbers from.
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value.device, value.dtype)


def forced(expert: int) -> Edit:
    """Scores that leave no doubt which expert is meant."""

    def force(value: Tensor) -> Tensor:
        scores = torch.full_like(value, -20.0)
        scores[..., expert] = 20.0
        return scores

    return force
