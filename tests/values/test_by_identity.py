"""What is remembered of an object goes with it, and is never taken for another's."""

from __future__ import annotations

import gc
from typing import Any

from torchhook._values.by_identity import ByIdentity


class Alike:
    """Equal to all of its kind, and without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)


def test_objects_that_are_equal_are_not_the_same() -> None:
    known, one, other = ByIdentity[int](), Alike(), Alike()
    known[one] = 1
    assert (known.get(one), known.get(other)) == (1, None)
    known[other] = 2
    known.forget(one)
    assert (known.get(one), known.get(other)) == (None, 2)
    known.forget(one)


def test_a_value_goes_with_its_object() -> None:
    known, one = ByIdentity[int](), Alike()
    known[one] = 1
    del one
    gc.collect()
    assert known._entries == {}


def test_an_object_that_has_the_number_of_one_that_is_gone_is_another() -> None:
    known: Any = ByIdentity[int]()
    one, other = Alike(), Alike()
    known[one] = 1
    known._entries[id(other)] = known._entries[id(one)]
    assert known.get(other) is None
    known[other] = 2
    del one
    gc.collect()
    assert known.get(other) == 2
