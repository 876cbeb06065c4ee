"""The ledger: numbers of a step wait on their devices and come to the host together, in one transfer from each."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._torch import foreach
from torchhook._values.elements import measurable
from torchhook._values.statistics import Measure, Measured
from torchhook._values.subclasses import local
from torchhook._watch.joining import Joiner
from torchhook._watch.places import Arrangement
from torchhook._watch.plans import Plans
from torchhook._watch.rows import MOST, READ, Row, Rows, has_rows
from torchhook._watch.shared import part_norm
from torchhook._watch.tables import Table

Key = Hashable
"""Where a number is in what ``read`` returns. A ``Row`` has its place in the table of its device, there under
``("table", device)``, or in the list of its norms, under ``("norms", device)``."""


class Several(NamedTuple):
    """A key of one of many numbers that are held together."""

    of: Key
    at: int


_SMALL = 1 << 20  # elements: what is larger fills a device alone
_HELD = 1 << 26  # bytes: gradients that are held would be held by their parameters too, mostly


class Known(NamedTuple):
    """What one step leaves to the next: how much room it needed on a device, and how its tensors were looked at."""

    room: tuple[int, int, int]
    plans: Plans
    again: Arrangement | None
    dtypes: frozenset[torch.dtype]


Room = dict[torch.device, Known]


class Ledger:
    """What was measured, until all of it is read at once."""

    def __init__(self, room: Room | None = None, joiner: Joiner | None = None) -> None:
        self._held: dict[Key, Tensor] = {}
        self._joiner = Joiner() if joiner is None else joiner
        # Appended to and taken from by autograd's threads, each at one stroke.
        self._later: deque[tuple[Key, Tensor, Any]] = deque()
        self._held_bytes = 0
        self._same: dict[Key, tuple[Key, int]] = {}
        self._room: Room = {} if room is None else room
        self.rows: dict[torch.device, Rows] = {
            device: Rows(device, known.room, known.plans, known.again) for device, known in self._room.items()
        }
        """Those that are taken of the tensors of a device."""
        self._dtypes: set[tuple[torch.device, torch.dtype]] = {
            (device, dtype) for device in self.rows for dtype in self._room[device].dtypes
        }
        self._keys = count()  # gradients are noted from autograd's threads, one for each device
        self._transfers: list[_Transfer] | None = None

    # -- taking --------------------------------------------------------------------------------------

    def note(self, tensor: Tensor) -> Key:
        """Hold a tensor of no or one dim; of booleans, the tensor itself is what ``read`` returns."""
        key = next(self._keys)
        self._held[key] = local(tensor)  # what a wrapper answers is wrapped again, and cannot be read
        return key

    def note_all(self, tensors: Sequence[Tensor]) -> list[Key]:
        """Hold several numbers of one device and dtype together."""
        if not tensors:
            return []
        key = next(self._keys)
        self.hold_all(key, tensors)
        return [Several(key, i) for i in range(len(tensors))]

    def hold_all(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """As ``note_all``, under a key that is the same in every step."""
        self._held[key] = self._joiner.join(tensors)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor, whose type is that of nearly all, is measurable and has a row, found out in few steps."""
        return (
            (tensor.device, tensor.dtype) in self._dtypes
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and 0 < tensor.numel() < MOST
            and not _torch.in_transform()
            and tensor.untyped_storage().nbytes() > 0
        )

    def norm(self, tensor: Tensor, plain: bool = False) -> Key:
        """Take the norm of what of a tensor lies on this rank, which may be nothing; it is ``plain`` if ``takes``."""
        return self.rows[tensor.device].norm(tensor) if plain else self._norm(tensor)

    def _norm(self, tensor: Tensor) -> Key:
        plain = local(tensor)
        if not (has_rows(plain) and measurable(tensor)):
            return self.note(part_norm(tensor))
        return self._rows_of(plain).norm(plain)

    @staticmethod
    def can_wait(tensor: Tensor) -> bool:
        """Whether the norm of a tensor is better taken together with others."""
        return _goes_together(tensor) and tensor.numel() <= _SMALL

    def norm_soon(self, key: Key, tensor: Tensor, kind: Any) -> None:
        """As ``norm``, but together with others when ``take_norms`` is called: nobody may write to it before.

        ``kind`` is the same for tensors of one device and dtype, and for no others.
        """
        # An alias: whoever owns the tensor itself may still be its only owner, and be allowed to keep it.
        self._later.append((key, tensor.detach(), kind))
        self._held_bytes += tensor.nbytes  # about: two threads may be counted as one
        if self._held_bytes > _HELD:
            self.take_norms()

    def take_norms(self) -> None:
        """Take the norms that were asked for."""
        later, alike = self._later, dict[Any, dict[Key, Tensor]]()
        self._held_bytes, of, some = 0, None, dict[Key, Tensor]()
        while later:
            try:
                key, tensor, kind = later.popleft()
            except IndexError:  # another thread takes them too
                break
            if kind is not of:
                of, some = kind, alike.setdefault(kind, {})
            some[key] = tensor
        for some in alike.values():
            held = next(self._keys)
            self.hold_all(held, foreach.norms(list(some.values())))
            self._same |= {key: (held, i) for i, key in enumerate(some)}

    def statistics(
        self, measure: Measure, tensor: Tensor, unit: int | None, plain: bool = False
    ) -> tuple[Measured | Key, Key | None]:
        """Take the statistics of a tensor, and where it can be done in the same pass, which units of a dim live.

        The key is that of what ``read`` has of all statistics together. It is ``plain`` if ``takes``.
        """
        part = tensor if plain else local(tensor)
        if measure.histograms or not (plain or has_rows(part)):
            return measure(tensor).map(self.note), None
        row = self._rows_of(part).statistics(part, unit)
        return row, (row, "live") if row.units else None

    def _rows_of(self, tensor: Tensor) -> Rows:
        device = tensor.device
        if device not in self.rows:
            self.rows[device] = Rows(device)
        if tensor.dtype in READ:
            self._dtypes.add((device, tensor.dtype))
        return self.rows[device]

    # -- reading -------------------------------------------------------------------------------------

    @property
    def is_far(self) -> bool:
        """Whether what it holds is on a device that works while the host does other things."""
        return bool(self.rows) or any(tensor.is_cuda for tensor in self._held.values())

    def send(self) -> None:
        """Start to bring everything over; nothing can be noted any more."""
        if self._transfers is None:
            self.take_norms()
            self._transfers = list(self._sent())
            self._room.clear()
            self._room.update({device: self._known(device, rows) for device, rows in self.rows.items() if rows.used})

    def _known(self, device: torch.device, rows: Rows) -> Known:
        dtypes = frozenset(dtype for of, dtype in self._dtypes if of == device)
        return Known(rows.room, rows.plans, rows.arranged(), dtypes)

    def _sent(self) -> Iterator[_Transfer]:
        held: dict[torch.device, dict[torch.dtype, list[Key]]] = {device: {} for device in self.rows}
        for key, tensor in self._held.items():
            if not tensor.is_cpu:
                held.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(key)
        for device, by_dtype in held.items():
            ordered = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)  # wide first, for alignment
            packed = [torch.cat([self._held[key].reshape(-1) for key in keys]).view(torch.uint8) for _, keys in ordered]
            rows = self.rows[device].sent() if device in self.rows else []
            yield _Transfer(device, ordered, [*rows, *packed])

    def is_there(self) -> bool:
        """Whether reading would wait for nothing."""
        self.send()
        assert self._transfers is not None
        return all(transfer.is_done() for transfer in self._transfers)

    def read(self) -> dict[Key, Any]:
        """Every number, by its key."""
        self.send()
        assert self._transfers is not None
        # What lies on the host already is read one by one: packing it would cost more than reading.
        values: dict[Key, Any] = {key: _content(t) for key, t in self._held.items() if t.is_cpu}
        for transfer in self._transfers:
            parts = transfer.parts()
            if transfer.device in self.rows:
                values |= self._read_rows(transfer.device, parts[:3])
                parts = parts[3:]
            for (dtype, keys), part in zip(transfer.ordered, parts, strict=True):
                pieces = part.view(dtype).split([self._held[key].numel() for key in keys])
                values |= {k: _content(p if self._held[k].dim() else p[0]) for k, p in zip(keys, pieces, strict=True)}
        values |= {key: values[of][at] for key, (of, at) in self._same.items()}
        self._held.clear()
        return values

    def _read_rows(self, device: torch.device, parts: list[Tensor]) -> dict[Key, Any]:
        numbers, norms, live = Rows.read(parts)
        rows, values = self.rows[device], dict[Key, Any]()
        if rows.looked:
            values["table", rows.number] = Table([row.size for row in rows.looked], numbers)
            values |= {(row, "live"): row.flags(live) for row in rows.looked if row.units}
        if rows.sized:
            values["norms", rows.number] = norms.tolist()
        return values


def norm_at(key: Key, numbers: dict[Key, Any]) -> float:
    """A norm in what was read."""
    kind: Any = type(key)
    found: float
    if kind is Several:
        found = numbers[key[0]][key[1]]  # type: ignore[index]
    else:
        found = numbers["norms", key.device][key.at] if kind is Row else numbers[key]  # type: ignore[attr-defined]
    return found


def _goes_together(tensor: Tensor) -> bool:
    """Whether one launch for many tensors is better. A CPU has no launches, and ways of its own to a norm."""
    return tensor.is_cuda and type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dtype in READ


def _content(tensor: Tensor) -> Any:
    return tensor if tensor.dtype == torch.bool else tensor.tolist()


class _Transfer:
    """Bytes on their way from a device to the host."""

    def __init__(self, device: torch.device, ordered: list[tuple[torch.dtype, list[Key]]], parts: list[Tensor]) -> None:
        self.device, self.ordered = device, ordered
        self._sizes = [part.numel() for part in parts]
        source = torch.cat(parts)
        self._done: torch.cuda.Event | None = None
        if not source.is_cuda:
            self._host = source.cpu()
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        return self._done is None or self._done.query()

    def parts(self) -> list[Tensor]:
        if self._done is not None:
            self._done.synchronize()
        return list(self._host.split(self._sizes))
