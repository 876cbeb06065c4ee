"""What a session is asked for before it opens: edits, looks, records, and how it is built of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from torchhook import edits
from torchhook._core import actions, choices, early_end, hooks, select
from torchhook._core.functional import Listener
from torchhook._core.hooks import Attachment, TensorHandles
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.lost_gradients import Units
from torchhook._core.ranks import Together
from torchhook._core.recorders import Recorders
from torchhook._core.scope import Scope
from torchhook._core.shown import Shown
from torchhook._core.taps import CustomTap, Look
from torchhook._core.targets import Outputs, Target
from torchhook._core.wiring import Taps
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._torch import graph_task
from torchhook.errors import SelectorError, SessionError

Threads = Literal["own", "all"]
NOTHING: Mapping[Any, Any] = {}


class Building(Shown):
    """What is asked of a session, and the taps that see it."""

    # What most sessions never need is the class's, until it is asked for: one may be made for each call of a model.
    gathers: Together | None = None
    """With the other ranks, where the gradients of parameters are wanted whole."""
    reduced = False
    """Whether the gradients of parameters are wanted as the optimizer will see them, over all ranks."""
    _recipe: tuple[Callable[[Index], Any], Callable[[Any, Any], None]] | None = None
    _chosen: Any = None
    _counts_steps = False  # who only looks, as a guard does, asks for none
    _wait_again: Callable[[], object] = frozenset
    """Called before each pass, to wait for all the sites again that it ends at."""

    def __init__(
        self, model: nn.Module, *, index: Index | None = None, threads: Threads = "own", warn: bool = True
    ) -> None:
        hooks.refuse_compiled_code()
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r}: use 'own' (the context that opens the session) or 'all'.")
        self.index: Index = Index(model) if index is None else index
        self._own_threads_only = threads == "own"
        self._warn = warn
        self._opener: dict[None, int] = {}
        """The thread that opens it, until it is closed: two may try at once, and one line decides which it is."""
        self._recorders: Recorders | None = None
        self._stops = False
        self._begin()

    def _begin(self) -> None:
        """What belongs to one opening; the rest is the same in all of them."""
        self.recording: Recording = Recording(self.index.model_name)
        self.scope: Scope = Scope()
        self._taps: Taps = Taps(self.index, self.scope, self.scope if self._own_threads_only else None)
        self._keeps: tuple[Keep, ...] = ()
        self._leaves: tuple[tuple[Tensor, Callable[[Tensor], Tensor | None]], ...] = ()
        self._to_come: tuple[tuple[Site, actions.ToCome], ...] = ()
        self._seen: set[Site] = set()
        self._followed: Mapping[Site, Tensor] = NOTHING
        self._attachment: Attachment | None = None
        self._closed = False

    @property
    def handles(self) -> TensorHandles:
        """Hooks on tensors, which go when the session closes."""
        return self._taps.handles

    # -- asking for something ----------------------------------------------------------------------

    def prepare(self, choose: Callable[[Index], Any], build: Callable[[Any, Any], None]) -> None:
        """Build the session of what ``choose`` finds in the model, and each time that it is opened again.

        What is found is chosen anew where modules are not where they were.
        """
        self._recipe = choose, build
        self._chosen = choose(self.index)
        choices.note(self.index)
        build(self, self._chosen)

    def _make_ready(self) -> None:
        """Make what belongs to one opening anew, if there was one before, and of the modules that are there now."""
        opens_again = self._attachment is not None
        if self._recipe is None:
            if opens_again:
                raise SessionError("a session of this kind opens once. Make a new one: they are cheap.")
            return
        choose, build = self._recipe
        if has_moved := not self.index.means_the_same():
            index = Index(self.index.given)
            self._chosen = choose(index)
            choices.note(index)
            self.index, self._recorders = index, None
        if opens_again or has_moved:
            self._begin()
            if self._recorders is None:
                build(self, self._chosen)
            else:
                self._keeps = self._recorders.begin(self.recording, self._taps)
                if self._stops:
                    self.stop_when_seen(self._recorders.outputs)

    def edit(self, target: Target, edit: Any) -> None:
        """Change every value that passes ``target``, after the edits that are there already."""
        site = target.site
        if target.tensor is not None and site.port != "grad":
            raise SelectorError(
                f"{site.shown!r} is a parameter or buffer: only its gradient can be edited, as '{site.path}:grad'. "
                "To change the value, edit what the module makes of it, or assign it."
            )
        select.refuse_counting_back(site, "an edit")
        given = edits.adapt(edit)
        self._counts_steps = self._counts_steps or not edits.is_same_in_every_step(given)
        change, to_come = actions.placed(given, target, self._taps.heads_at(target), self._own_threads_only)
        if to_come is not None:
            self._to_come = (*self._to_come, (site, to_come))
        self._taps.of(target).add_edit(actions.only_edit(site, actions.editor(site, change), self._seen))

    def look(self, target: Target, look: Look) -> None:
        """Hand every value that passes ``target`` to ``look``, after all edits."""
        select.refuse_counting_back(target.site, "whoever looks")
        look = actions.only_look(target.site, actions.of_leaf(target.site, look), self._seen)
        self._taps.of(target).add_look(look)

    def follow(self, parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``hook`` with the gradients of a parameter as autograd hands them over; it is no site."""
        self._leaves = (*self._leaves, (parameter, hook))

    def record(
        self, targets: Iterable[Target], keep: Keep, max_records: int | None = None, before_edits: bool = False
    ) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        recording, taps = self.recording, self._taps
        if type(targets) is Outputs and keep.only_copies and taps.is_new and not before_edits:
            self._recorders = Recorders(self.index, targets, keep, max_records)
            self._keeps = self._recorders.begin(recording, taps)
            return
        chosen = list(targets)
        units = Units(self.index) if keep.mode in ("live", "reference") else None
        task, padding = graph_task(), taps.call_padding(keep)
        fast = keep.only_copies and not before_edits
        for target, others, calls in select.by_site(chosen):
            site = target.site
            rows = recording.opened(site, max_records, calls)
            own = keep.placed(site, taps.heads_at(target, at_once=True)) if keep.asks_where else keep
            if fast and taps.record(target, own, rows, recording.order, task):
                continue
            tap, recorder = taps.of(target), actions.on_graph(site, own, own.recorder(rows.append, recording.order))
            recorder = actions.checked(units.checked(site) if units else None, recorder)
            recorder = actions.of_leaf(site, actions.knowing_padding(padding, site.path, recorder))
            recorder = actions.only_keep(calls, recorder, self._seen)
            for other in others:
                taps.of(other)
            if before_edits:
                tap.add_edit(actions.looked_at_first(tap, recorder), first=True)
            else:
                tap.add_look(recorder)
        names, layouts = recording.other_names, recording.find_layouts
        later = select.found_later(self.index, [target.site for target in chosen], names, layouts)
        recording.other_names, recording.find_layouts = later
        recording.wait_with(keep.wait)
        self._keeps = (*self._keeps, keep)
        self._taps.root.add_look(actions.inputs_kept_from(keep), first=True)

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self.scope if self._own_threads_only else None, function)
        tap.add_look(keep.recorder(self.recording.opened(target.site, max_records).append, self.recording.order))
        self._taps.custom(target, tap)

    def stop_when_seen(self, targets: Sequence[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        if not self._own_threads_only:
            raise SessionError("stop=True ends the session's own calls only: leave out threads='all'.")
        self._stops = True
        sites, check = frozenset([target.site for target in targets]), early_end.refusal(self.index)
        waiting = set(sites)
        self._wait_again = partial(waiting.update, sites)
        recorders, shared = self._taps.recorders, self._recorders
        # As they are recorded: nothing else is at those taps.
        if recorders is not None and shared is not None and shared.outputs is targets:
            for site, tap in zip(shared.outputs.sites, recorders, strict=True):
                tap.looks = (actions.stopper(self.scope, waiting, site, self._keeps, check),)
            return
        for target in targets:
            if target.site.port.startswith("grad"):
                raise SessionError(
                    f"stop=True ends the forward pass, and {target.site.shown!r} needs the backward pass."
                )
            select.refuse_open_end(target.site)
            self.look(target, actions.stopper(self.scope, waiting, target.site, self._keeps, check))

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every functional operation inside the modules."""
        self._taps.listen(listener)

    @property
    def sites(self) -> list[Site]:
        """The sites that are edited, looked at or recorded."""
        return list(self._taps.targets)

    @property
    def edited_in_segments(self) -> list[Site]:
        """The sites that were edited inside checkpointed segments, which run again in the backward pass."""
        return [site for site, (_, tap) in self._taps.targets.items() if tap.edits and tap.segments.noted]
