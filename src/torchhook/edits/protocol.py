"""What an edit is: any function of a passing value, and the base of those in the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchhook._recording import steps
from torchhook._recording.address import Site
from torchhook._values.heads import KnownHeads
from torchhook._values.parts import Part
from torchhook._values.value_object import ValueObject


class Edit(Protocol):
    """Takes a passing value and the site that it passes, and returns the value to go on with, or ``None`` for the same.

    A plain function is enough, also one of the value alone. The new value must be like the old one: the same
    structure, shapes, dtypes and devices.

    >>> def louder(value: Tensor, site: Site) -> Tensor:
    ...     return value * 2 if site.call == 0 else value
    >>> edit: Edit = louder

    In a session, the site has the number of the call, counted from when the session opened, and ``site.step``, the step
    of the generation under way: 0 for the prompt, ``None`` outside of one.
    """

    def __call__(self, value: Any, site: Site, /) -> Any: ...


class EditSite(Site):
    """The site that an edit is told, while the value passes there.

    >>> EditSite("h.3", call=0).step is None
    True
    """

    __slots__ = ()

    @property
    def step(self) -> int | None:
        """The step of the generation under way: 0 for the prompt; ``None`` outside of one."""
        # Asked for when it is read, as most edits never do: compiled code could not.
        now = steps.current()
        return None if now is None else now.step


class StepsToCome(NamedTuple):
    """Steps of a generation that an edit was for, and that it never saw."""

    which: str
    """As one would name them: "step 3"."""
    last: int | None
    """The last that it saw; ``None`` if it was never called."""


class CataloguedEdit(ValueObject):
    """Base of the edits that come with the library; what they hold may be other edits."""

    room = "edits."
    changes_call = False
    """Whether it changes how an operation is called, and not only the tensors: then nothing is checked after it."""

    asks_step = False
    """Whether it depends on the step of a generation."""

    def __call__(self, value: Any, site: Site, /) -> Any:
        raise NotImplementedError

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        """The same edit for one site, told what is known of the heads there; only some want to know."""
        return self

    def steps_to_come(self) -> Iterator[StepsToCome]:
        """What a placed edit, or those that it holds, have waited for in vain."""
        return iter(())

    def within(self, part: Part, whole: Tensor) -> Edit:
        """The same edit for a part of a tensor: what it holds for the whole of it is taken at that part."""
        return self


def asks_step(edit: Edit) -> bool:
    """As ``CataloguedEdit.asks_step``, for any edit."""
    return isinstance(edit, CataloguedEdit) and edit.asks_step


def steps_to_come(edit: Edit) -> Iterator[StepsToCome]:
    """As ``CataloguedEdit.steps_to_come``, for any edit."""
    return edit.steps_to_come() if isinstance(edit, CataloguedEdit) else iter(())


def placed(edit: Edit, site: Site, known: Callable[[], KnownHeads]) -> Edit:
    """As ``CataloguedEdit.placed``, for any edit."""
    return edit.placed(site, known) if isinstance(edit, CataloguedEdit) else edit
