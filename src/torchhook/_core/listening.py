"""The gradient of one tensor *from here on*: of what becomes of it after this moment, and of nothing else.

A tensor hook tells what flows into a step of the graph, from all who ever used its result::

      before           here            from here on
                         │
    x.grad_fn ◀───── read│(inside the module that made x)
        ▲  ▲─────────────│── read
        │                │
        └────────────────│── write in place ◀── read

Two things have to be kept apart from what is asked for:

*Uses from before.* Most values have none: autograd numbers its steps, and if the step that made a value is the newest,
nobody has used it yet. Then a hook on the tensor itself is right (``listen``). Otherwise, and for what lives elsewhere
too (a module's own input, a parameter), the model is handed an alias, a view with a step of its own (``Alias``).

*Writes in place.* They take views, and our aliases with them, off the graph (pytorch#61519): what flows through the
write then arrives at the tensor that it is a view of. So that one is listened to as well, and told whether a write
came in between by a tensor without memory that shares the version counter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._core.hooks import TensorHandles
from torchhook._core.scope import Scope
from torchhook._core.writes import (
    LONG,
    Part,
    Step,
    Sum,
    TensorHook,
    Written,
    counts_versions,
    first_write,
    root,
    step_of,
)
from torchhook._torch import sequence_number, version
from torchhook._torch.hooks import first_on


class GradientListener(NamedTuple):
    """Who listens: what is called, for which site, in whose session."""

    hook: TensorHook
    site: str = ""
    session: Scope | None = None


def is_unused(tensor: Tensor, listener: GradientListener) -> bool:
    """Whether nobody can have used a tensor yet, nor what it is a view of: their steps are the newest there are."""
    whole, newest = root(tensor), _latest.before(listener)
    if tensor.grad_fn is None or whole.grad_fn is None or not newest:
        return False
    made, step = sequence_number(whole.grad_fn), tensor.grad_fn
    for views in range(LONG):
        if sequence_number(step) == made:
            return made + views + 1 == newest
        if not step.next_functions or step.next_functions[0][0] is None:
            return False
        step = step.next_functions[0][0]
    return False


def listen_directly(tensor: Tensor, listener: GradientListener, hook: LinkHook, handles: TensorHandles) -> bool:
    """What ``is_unused`` and ``listen`` do with a plain tensor that is no view, as most are; whether it was one.

    ``hook`` is called in the place of the listener's, which is that of all calls.
    """
    made = tensor.grad_fn
    if made is None or _torch.base_of(tensor) is not None or _torch.is_wrapped(tensor):
        return False
    number = sequence_number(made)
    if number + 1 != _torch.next_sequence_number():
        return False
    handles.on_gradient(tensor, Link(_chain_at(tensor, (number, tensor.output_nr)), listener, hook))
    return True


def listen(tensor: Tensor, listener: GradientListener, handles: TensorHandles, total: bool = False) -> None:
    """Tell ``listener`` of all that flows into a tensor; in ``total``, into what it is an alias of too."""
    names = _names(tensor, total)
    tensor, hook = names[-1], listener.hook
    whole = _torch.base(tensor) if counts_versions(tensor) else None
    if whole is None or whole.is_leaf or not whole.requires_grad or whole.dtype != tensor.dtype:
        _link(tensor, listener, lambda grad, _: hook(grad), handles)
        return
    written, part, read, alone = Written(tensor), Part(tensor, whole), Sum(), len(names) == 1

    def at_view(grad: Tensor, arrived: Tensor) -> Tensor | None:
        if written.before_backward():
            return None  # it is only a part, and goes on to the whole
        if alone:
            return hook(grad)
        read.add(grad)
        return None

    def at_whole(grad: Tensor, arrived: Tensor) -> Tensor | None:
        if written.before_backward():
            new = hook(part.of(grad))
            return None if new is None else part.put(grad, new)
        return part.exchange(hook, read.take(), grad, arrived)

    for name in names:
        _link(name, listener, at_view, handles)
    _link(whole, listener, at_whole, handles)


def _names(tensor: Tensor, total: bool) -> list[Tensor]:
    """The tensors that a value is read from: for an alias that was written to, what it is an alias of too.

    Until then, all that is read from it flows back there.
    """
    made: Mark | None = getattr(tensor, _MARK, None)
    if made is None:
        return [tensor]
    if made.version is None or version(tensor) == made.version:
        return _names(made.of, total) if total else [tensor]
    above = _names(made.of, total)
    return above if above[-1] is root(tensor) else [tensor, *above]


# -- several listeners -------------------------------------------------------------------------------------------

_CHAIN = "_torchhook_chain"  # on a tensor: who listens to it, and at which step
_NO_CHAIN: tuple[None, None] = None, None

LinkHook = Callable[[Tensor, Tensor], Tensor | None]
"""Takes a gradient as those have left it who hear of it first, and as it arrived."""


class Chain:
    """All who listen to one step of the graph, and hear of a gradient one after the other, as it flows back.

    Whoever came last is nearest to the result, and comes first. Sessions at the same site are of the same moment: there
    the outer one comes first, as with values.
    """

    __slots__ = ("done", "links")

    def __init__(self) -> None:
        self.links: list[ref[Link]] = []  # they hold the chain, and go with their hooks
        self.done: WeakSet[Link] | None = None  # most have one link, and never need it

    def in_order(self) -> list[Link]:
        moments: list[list[Link]] = []
        for link in filter(None, (link() for link in self.links)):
            if moments and all(_same_moment(link.listener, other.listener) for other in moments[-1]):
                moments[-1].append(link)
            else:
                moments.append([link])
        return [link for moment in reversed(moments) for link in moment]


class Link:
    """The hook of one listener. Torch calls the oldest first, which then does the work of all that came later."""

    __slots__ = ("__weakref__", "chain", "hook", "listener")

    def __init__(self, chain: Chain, listener: GradientListener, hook: LinkHook) -> None:
        self.chain, self.listener, self.hook = chain, listener, hook
        chain.links.append(ref(self))

    def __call__(self, arrived: Tensor | None) -> Tensor | None:
        if arrived is None:  # torch calls hooks where no gradient comes, too (pytorch#11751)
            return None
        chain = self.chain
        if len(chain.links) == 1:
            return self.hook(arrived, arrived)
        if chain.done is not None and self in chain.done:
            chain.done.remove(self)
            return None
        links, grad = chain.in_order(), arrived
        chain.done = WeakSet(link for link in links if link is not self)
        for link in links:
            new = link.hook(grad, arrived)
            grad = grad if new is None else new
        return None if grad is arrived else grad


def _same_moment(one: GradientListener, other: GradientListener) -> bool:
    return one.site == other.site and one.session is not other.session


def _link(tensor: Tensor, listener: GradientListener, hook: LinkHook, handles: TensorHandles) -> None:
    step = step_of(tensor)
    # A leaf outlives the session.
    chain = Chain() if step is None else _chain_at(tensor, step)
    handles.on_gradient(tensor, Link(chain, listener, hook))


def _chain_at(tensor: Tensor, step: Step) -> Chain:
    """The chain of a tensor, made where there is none yet; it may be the first hook itself."""
    at, chain = getattr(tensor, _CHAIN, _NO_CHAIN)
    if chain is None or at != step:
        chain = first if isinstance(first := first_on(tensor), Chain) else Chain()
        setattr(tensor, _CHAIN, (step, chain))
    return chain


# -- aliases -------------------------------------------------------------------------------------------------------

_MARK = "_torchhook_alias"


class Mark(NamedTuple):
    """On a tensor that is an alias: for whom it was made, of what, of which version, and who uses it."""

    listener: GradientListener
    of: Tensor
    version: int | None
    users: WeakSet[Alias]


class Alias:
    """A view that is handed on in the place of a tensor, so that its gradient is told apart from that of others."""

    def __init__(self, tensor: Tensor, listener: GradientListener, handles: TensorHandles) -> None:
        self.tensor: Tensor | None = tensor if _is_alias_of_this_moment(tensor, listener) else _view(tensor, listener)
        self._listener = listener
        self._handles = handles
        self._flown = Sum()
        self._is_written = False
        getattr(self.tensor, _MARK).users.add(self)
        _link(self.tensor, listener, self._at_alias, handles)
        whole = root(self.tensor) if counts_versions(self.tensor) else self.tensor
        self._can_be_written = whole is not self.tensor and whole.requires_grad and whole.dtype == tensor.dtype
        if self._can_be_written:
            self._part = Part(self.tensor, whole)
            self._before = version(self.tensor)
            self._step = step_of(whole)
            if not whole.is_leaf:
                _link(whole, listener, self._at_whole, handles)

    def was_written(self) -> bool:
        """Whether the memory was written to since the alias was made."""
        return self._can_be_written and self.tensor is not None and version(self.tensor) != self._before

    def settle(self) -> None:
        """No more writes that count will come: follow the first that came, if one did, and let go of the memory."""
        if not self.follow_write() and self.was_written() and self.tensor is not None:
            whole = root(self.tensor)
            if step_of(whole) == self._step:  # otherwise all of it was overwritten, and nothing flows through
                self._follow_behind_autograd(self.tensor, whole)
        self.tensor = None

    def follow_write(self) -> bool:
        """Follow the first write that autograd has seen, if there is one."""
        if self.was_written() and self.tensor is not None and self._step is not None and not self._is_written:
            found = first_write(root(self.tensor), self._step)
            if found is not None:
                self._is_written = True
                node, places = found
                self._handles.on_node(node, lambda grads, _: self._at_write(grads, places))
        return self._is_written

    def _follow_behind_autograd(self, alias: Tensor, whole: Tensor) -> None:
        """After a write that autograd did not see, an alias has another step: what is read from then on flows there,
        and from there to the whole at once, past those that it is an alias of."""
        users = [user for user in _users(alias) if user is self or user.was_written() or user._is_written]
        with contextlib.suppress(RuntimeError):  # one of several views that were made at once: nobody can read it now
            for user in users:
                _link(alias, user._listener, user._at_alias, self._handles)
            self._is_written = True
            if whole.is_leaf:
                _link(whole, self._listener, self._at_whole, self._handles)

    # What is read before the write and what flows through it arrive in any order, and both before the whole does.

    def _at_alias(self, grad: Tensor, arrived: Tensor) -> Tensor | None:
        if not self._is_written:
            return self._listener.hook(grad)
        self._flown.add(grad)
        return None

    def _at_write(self, grads: tuple[Tensor | None, ...], places: list[int]) -> None:
        for grad in (grads[place] for place in places):
            if grad is not None:
                self._flown.add(self._part.of(grad))

    def _at_whole(self, grad: Tensor, arrived: Tensor) -> Tensor | None:
        return self._part.exchange(self._listener.hook, self._flown.take(), grad, arrived)


class Latest(threading.local):
    """The latest steps of autograd in a thread, if they are aliases that were made at one site for one session."""

    def __init__(self) -> None:
        # Not the listener: this stays, and what it hears must not.
        self._whose: tuple[str, Scope | None] = "", None
        self._first = self._end = 0

    def made(self, step: int, listener: GradientListener) -> None:
        if step != self._end or self._whose != listener[1:]:
            self._first, self._whose = step, listener[1:]
        self._end = step + 1

    def before(self, listener: GradientListener) -> int:
        """The number of the next step, as if those had not been made that another session has made at the same site."""
        newest, (site, session) = _torch.next_sequence_number(), self._whose
        of_another = site == listener.site and session is not listener.session
        return self._first if newest == self._end and of_another else newest


_latest = Latest()


def _view(tensor: Tensor, listener: GradientListener) -> Tensor:
    with torch.enable_grad():  # it must stay on the graph, whoever runs the module
        try:
            alias = tensor[...]  # with the very strides: view_as changes those of dims that have one element
        except NotImplementedError:  # by DTensors of torch 2.6
            alias = tensor.view_as(tensor)
    if alias.grad_fn is not None:
        _latest.made(sequence_number(alias.grad_fn), listener)
    setattr(alias, _MARK, Mark(listener, tensor, version(alias) if counts_versions(alias) else None, WeakSet()))
    return alias


def _is_alias_of_this_moment(tensor: Tensor, listener: GradientListener) -> bool:
    """Whether another session has just made an alias at the same site."""
    made: Mark | None = getattr(tensor, _MARK, None)
    if made is None or not _same_moment(made.listener, listener):
        return False
    return made.listener.session is not None and not made.listener.session.closed  # it would make one at every call


def _users(tensor: Tensor) -> list[Alias]:
    """Those who use a tensor as an alias, and what it is an alias of; from the first to the last."""
    made: Mark | None = getattr(tensor, _MARK, None)
    return [] if made is None else [*_users(made.of), *made.users]


def original(tensor: Tensor) -> Tensor:
    """What a tensor would be if no aliases were handed on."""
    made: Mark | None = getattr(tensor, _MARK, None)
    return tensor if made is None else original(made.of)


class Entered:
    """What a module was given. The versions of the tensors tell afterwards what it wrote to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions: dict[int, int | None] = {}
        self._memory: set[int | None] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor], one: tuple[int, int, int] | None = None) -> None:
        if one is not None:
            self._versions[one[1]] = one[2]
        for tensor in tensors:
            known = version(tensor) if counts_versions(tensor) else None
            self._versions.setdefault(id(original(tensor)), known)
            key = _torch.storage_key(tensor)
            if key is not None:
                self._memory.add(key)

    def is_among(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of them, or lies in their memory."""
        return id(original(tensor)) in self._versions or _torch.storage_key(tensor) in self._memory

    def was_written(self, tensor: Tensor) -> bool:
        """Whether it is one of them, and was written to since."""
        before = self._versions.get(id(original(tensor)))
        return before is not None and counts_versions(tensor) and version(tensor) != before
