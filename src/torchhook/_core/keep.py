"""From a passing value to the one that is kept: safe, detached, transformed, cast, moved.

This is the only home of copy-on-write.

*Copy-on-write.* ``lazy_clone`` shares a tensor's memory until someone writes to it, so a safe
capture costs a copy only where the model really overwrites the value. Memory that outlives the forward
(parameters, buffers, the caller's own inputs) is cloned for real instead: a shared storage moves to a new
address when it is written, which raw pointers held elsewhere (numpy views, CUDA graphs) would not follow.

*Side streams.* ``.cpu()`` in a hook makes the model wait for the transfer. ``device="cpu"`` copies CUDA
tensors to pinned memory on a stream of its own instead; ``Keep.wait`` waits for them, when something is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from torchhook import transforms
from torchhook._core import per_site
from torchhook._core.index import ids_of
from torchhook._core.per_site import PerSite
from torchhook._recording.address import Site
from torchhook._torch import (
    base_of,
    in_dual_level,
    in_transform,
    is_lazy_clone,
    lazy_clone,
    out_of_checkpoints,
    storage_key,
    unwrapped,
    use_count,
)
from torchhook._torch.hooks import held_by_tuple, held_by_view
from torchhook._values import devices, tree
from torchhook._values.heads import KnownHeads
from torchhook._values.host_copies import HostCopies
from torchhook._values.subclasses import cloned
from torchhook._values.wrappers import ORDINARY, carrying, is_causal_bias
from torchhook.transforms import Transform

MODES = ("copy", "live", "reference", "clone")
_HOST = torch.device("cpu")

_ROOMY = 2  # a storage this many times larger than the tensor is not worth holding on to

# To copy so much takes less time than to look through a large model for its owner; a value counts for so many bytes at
# least. Who keeps more looks once, and then knows.
_COPIED_FIRST = 1 << 18
_AT_LEAST = 1 << 16


class Keep:
    """How values are kept: ``keep.value(passing)`` is what is kept of one.

    ``mode`` is ``"copy"`` (detached and safe), ``"live"`` (safe, still on the autograd graph), ``"reference"`` (the
    bare tensor, which the model may overwrite) or ``"clone"`` (as copy, but memory is never shared).
    ``transform`` sees the passing value before it is copied, so that what it throws away is never copied or moved.
    """

    # What it is told when a session opens is the class's until then: one is made for each session.
    _owned: Callable[[], Iterable[Tensor]] = tuple
    _find_ids: Callable[[], frozenset[int]] | None = None
    _owned_ids: frozenset[int] | None = frozenset()
    _inputs: Sequence[Tensor] = ()
    _input_ids: frozenset[int] | None = None
    _outliving_ids: frozenset[int] | None = frozenset()
    _outliving_storages: frozenset[int | None] | None = None
    _copied_first = 0
    """So many bytes were copied because it was not known whose they are."""
    _of_calls: Sequence[tuple[Site, Keep]] = ()
    """The same for single calls of one site, where their transforms differ."""

    def __init__(
        self,
        mode: str = "copy",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | PerSite | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"keep={mode!r} is not a way to keep values; use {', '.join(map(repr, MODES))}.")
        if transform is not None and not isinstance(transform, PerSite):
            per_site.check("transform", transform)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, found {dtype!r}.")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"dtype={dtype}: floating-point values are cast to this, and would lose what is behind the point. "
                "Use a floating-point dtype, or transform=lambda value: … to round and scale them."
            )
        self.mode = mode
        self.device: torch.device | None = None if device is None else devices.named(device, "device")
        self.dtype = dtype
        self.transform: Any = transform
        self.asks_where: bool = transform is not None and (
            isinstance(transform, PerSite) or transforms.asks_where(transform)
        )
        """Whether the transform wants to know where it is: then every site has to be kept by a ``placed`` one."""
        self._to_host = HostCopies() if device is not None and self.device == _HOST else None
        self.wait: Callable[[], None] = _at_once if self._to_host is None else self._to_host.wait
        """Returns when every value that was kept can be read. It knows the copies alone: a recording may hold it."""
        self.only_copies: bool = transform is None and mode in ("copy", "clone")
        """Whether nothing is asked when a value passes but the value itself."""
        self._is_plain = self.device is None and dtype is None
        self._may_be_fast = mode == "copy" and dtype is None and (self._is_plain or self._to_host is not None)
        self._is_fast = self._may_be_fast and transform is None
        self._placed: Sequence[Keep] = ()
        """The same for single sites, which have to know what this one is told."""

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Keep:
        """The same way to keep values, for one site, where ``asks_where``."""
        transform = self.transform.of(site) if isinstance(self.transform, PerSite) else self.transform
        if not isinstance(transform, list):
            return self._with(transform, known)
        keep = self._with(None, known)
        keep._of_calls = [(call, self._with(one, known)) for call, one in transform]
        return keep

    def _with(self, transform: Transform | None, known: Callable[[], KnownHeads]) -> Keep:
        keep = copy.copy(self)
        keep.transform = transforms.placed(transform, known)
        keep._is_fast = self._may_be_fast and transform is None
        keep._placed = ()
        self._placed = [*self._placed, keep]
        return keep

    def recorder(self, put: Callable[[tuple[int, int, Any]], None], order: Iterator[int]) -> Callable[[Any, int], None]:
        """A function that keeps a passing value and puts it away with its call index and its place in ``order``."""
        if several := self._of_calls:
            return lambda value, call: put((call, next(order), _of_call(several, call).kept(value)))
        return lambda value, call: put((call, next(order), self.kept(value)))

    def kept(self, value: Any, made_here: bool = False) -> Any:
        """As ``value``, which is written out here for a plain tensor: this runs once for every captured layer.

        ``made_here`` says that only the running call holds the value, which then has made it: nobody needs to look
        whether it outlives the forward pass.
        """
        if (
            self._is_fast
            and type(value) is Tensor
            and not value.is_inference()
            and not value.is_quantized
            and not in_transform()
            and (self._to_host is None or value.is_cpu or value.is_cuda)
            and (made_here or not self._outlives(value))
            and (
                (base := base_of(value)) is None
                or self._is_passing(getrefcount(base) + use_count(base) <= held_by_view, base, value)
            )
        ):
            try:
                # data: quicker than detach, and no view is kept.
                kept = lazy_clone(value.data if _is_differentiated(value) else value)
                return kept if self._to_host is None or value.is_cpu else self._to_host.copy(kept, shared_with=value)
            except (NotImplementedError, RuntimeError):
                pass
        if made_here and self._is_fast and type(value) is tuple and (kept_parts := self._parts(value)) is not None:
            return kept_parts
        return self.value(value)

    def _parts(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What is kept of a tuple that only the running call holds; ``None`` if it holds more than new tensors."""
        found: list[Any] = []
        for part in values:
            if type(part) is Tensor and getrefcount(part) <= held_by_tuple:
                found.append(self.kept(part, True))
            elif part is None:
                found.append(None)
            else:
                return None
        return tuple(found)

    def value(self, value: Any) -> Any:
        """What is kept of one passing value."""
        if self.transform is not None:
            # A checkpoint that runs has hooks on what autograd saves, and would miss what is not saved again.
            on_graph = self.mode in ("live", "reference") and torch.is_grad_enabled()
            with out_of_checkpoints() if on_graph else torch.no_grad():
                value = self.transform(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        try:
            return tree.map_tensors(self._tensor, value)
        except RecursionError:  # a list that holds itself: no tree to rebuild
            return value

    def owned_by(
        self, tensors: Callable[[], Iterable[Tensor]], ids: Callable[[], frozenset[int]] | None = None
    ) -> None:
        """Say how to find the tensors that the model owns. Their memory outlives the forward pass.

        ``ids`` finds those that are no parameters, which are known by their type.
        """
        self._owned, self._find_ids, self._owned_ids, self._copied_first = tensors, ids, None, 0
        # As called_with, without the call: this is done whenever a session opens and closes.
        self._inputs, self._input_ids, self._outliving_ids, self._outliving_storages = (), None, None, None
        for keep in self._placed:
            keep.owned_by(tensors, ids)

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        """Name the tensors that the model is called with. Their memory outlives the forward pass too."""
        self._inputs = list(tensors)
        self._input_ids = self._outliving_ids = self._outliving_storages = None
        for keep in self._placed:
            keep.called_with(self._inputs)

    def _outlives(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of those that outlive the forward pass, or may be, and to look would take longer."""
        if self._owned_ids is None and tensor.layout == torch.strided:
            if self._input_ids is None:
                self._input_ids = ids_of(self._inputs)
            if id(tensor) in self._input_ids:
                return True
            if is_lazy_clone(tensor):
                # Memory that is shared already moves when it is written, whoever owns it.
                return False
            if self._copied_first < _COPIED_FIRST:
                self._copied_first += max(tensor.nbytes, _AT_LEAST)
                if self._copied_first <= _COPIED_FIRST:
                    return True
        return id(tensor) in (self._outliving_ids or self._ids())

    def _is_passing(self, only_viewed: bool, base: Tensor, view: Tensor) -> bool:
        """Whether the memory of a view is made in the forward pass, and not much larger than the view.

        ``only_viewed``: nobody but the view holds ``base``. Counted before the others, for arguments are references.
        """
        if type(base) is not Tensor or base is view or (not only_viewed and self._outlives(base)):
            return False
        try:
            return base.nbytes <= _ROOMY * view.nbytes  # a small view would hold on to all of it
        except (NotImplementedError, RuntimeError):
            return False

    def _ids(self) -> frozenset[int]:
        """The tensors that outlive the forward pass; those of the model are looked for when it matters first."""
        if self._outliving_ids is None:
            if self._owned_ids is None:
                find = self._find_ids
                self._owned_ids = ids_of(self._owned()) if find is None else find()
            self._outliving_ids = self._owned_ids | ids_of(self._inputs)
        return self._outliving_ids

    def release(self) -> None:
        """Let go of what the model owns, was called with and made: nothing more will pass."""
        # As owned_by, without the call.
        self._owned, self._find_ids, self._owned_ids = tuple, None, None
        self._inputs, self._input_ids, self._outliving_ids, self._outliving_storages = (), None, None, None
        if self._placed:
            for keep in self._placed:
                keep.owned_by(tuple)
            self._placed = ()
        if self._to_host is not None:
            self._to_host.settle()

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_causal_bias(tensor):  # nobody writes to it, and torch 2.6 lets nobody copy it
            return tensor
        kept = self._as_it_is(tensor) if self._is_plain else self._converted(tensor)
        return kept if type(tensor) in ORDINARY else carrying(kept, tensor)

    # Not a bound method that is chosen once: an object that holds itself waits for the collector, and its values too.
    def _as_it_is(self, tensor: Tensor) -> Tensor:
        if self.mode == "reference":
            return tensor
        if self.mode != "clone" and self._may_share(tensor):
            try:
                return lazy_clone(tensor.detach() if self.mode == "copy" and _is_differentiated(tensor) else tensor)
            except (NotImplementedError, RuntimeError):
                pass  # sparse and opaque layouts; memory that torch does not own
        return tensor.clone() if self.mode == "live" else _detached_clone(tensor)

    def _may_share(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory may be shared copy-on-write, as far as one can tell beforehand."""
        if type(tensor) is not Tensor or tensor.is_quantized or in_transform():  # a Parameter outlives by its type
            return False
        if self._outlives(tensor):
            return False
        base = base_of(tensor)
        if base is not tensor and not tensor.is_inference():
            return base is None or self._is_passing(getrefcount(base) + use_count(base) <= held_by_view, base, tensor)
        # Nobody knows what it is a view of.
        try:
            if tensor.untyped_storage().nbytes() > _ROOMY * tensor.nbytes:
                return False  # a small view would hold on to all of it
        except (NotImplementedError, RuntimeError):
            return False
        if self._outliving_storages is None:
            self._outliving_storages = frozenset(map(storage_key, [*self._owned(), *self._inputs]))
        return storage_key(tensor) not in self._outliving_storages

    def _converted(self, tensor: Tensor) -> Tensor:
        detach = self.mode in ("copy", "clone") and _is_differentiated(tensor)
        source = tensor.detach() if detach else tensor
        if self.dtype is not None and source.is_floating_point():
            source = source.to(self.dtype)
        strided = type(source) is Tensor and source.layout == torch.strided and not source.is_quantized
        if self._to_host is not None and source.is_cuda and strided and self.mode in ("copy", "clone"):
            if source.dtype != tensor.dtype:  # cast into fresh memory, which nobody else writes to
                return self._to_host.copy(source)
            return self._to_host.copy(self._as_it_is(source), shared_with=tensor)
        if self.device is not None:
            source = source.to(self.device)
        fresh = source.dtype != tensor.dtype or source.device != tensor.device
        return source if fresh else self._as_it_is(source)


def _of_call(several: Sequence[tuple[Site, Keep]], call: int) -> Keep:
    return next(keep for site, keep in several if site.means(call))


def _at_once() -> None:
    """Nothing is on its way."""


def _detached_clone(tensor: Tensor) -> Tensor:
    # Not always detach: subclasses refuse it on inference tensors.
    tensor = unwrapped(tensor)
    return cloned(tensor.detach() if _is_differentiated(tensor) else tensor)


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether derivatives may follow a tensor: by a graph, or forward with it."""
    return tensor.requires_grad or in_dual_level()
