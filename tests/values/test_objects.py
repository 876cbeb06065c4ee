"""Plain objects: what is opened of them, loops, and objects that do not want to be copied."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from torchhook._values import tree


class Holder:
    """A plain object, like a key-value cache."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@dataclasses.dataclass
class Box:
    first: Any
    second: Any = None


def test_an_object_that_holds_only_data_is_copied_so_that_what_is_put_in_later_does_not_show() -> None:
    cache = Holder(length=3, layers=[])
    kept = tree.map_tensors(lambda t: t + 1, cache)
    cache.layers.append(torch.zeros(1))
    cache.length = 4
    assert kept.layers == []
    assert kept.length == 3


def test_an_object_that_holds_itself_is_a_leaf() -> None:
    knot = Holder(data=torch.zeros(1))
    knot.me = knot
    assert tree.unpack(knot) is None
    far = Holder(data=1)
    far.next = Holder(back=far)
    assert tree.unpack(far) is None


def test_an_empty_key_value_cache_does_not_show_what_is_put_in_later() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cache = cache_utils.DynamicCache()
    kept = tree.map_tensors(torch.clone, {"past": cache})["past"]
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    assert type(kept) is type(cache)
    assert len(cache.layers) == 1
    assert kept.layers == []


# -- objects that do not want to be copied ------------------------------------------------------------


class Single:
    """The only one of its kind, however one asks for another."""

    _one: Any = None

    def __new__(cls) -> Any:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one


class Uncopied(Holder):
    def __copy__(self) -> Any:
        return self


class UncopiedList(list):
    def __copy__(self) -> Any:
        return self


class UncopiedDict(dict):
    def __copy__(self) -> Any:
        return self


@dataclasses.dataclass
class UncopiedBox:
    h: Any

    def __copy__(self) -> Any:
        return self


def single() -> Single:
    value = Single()
    value.h = torch.zeros(1)  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Uncopied(h=torch.zeros(1)),
        lambda: UncopiedList([torch.zeros(1)]),
        lambda: UncopiedDict(h=torch.zeros(1)),
        lambda: UncopiedBox(torch.zeros(1)),
        single,
    ],
    ids=["object", "list", "dict", "dataclass", "singleton"],
)
def test_an_object_whose_copy_is_itself_is_never_written_to(make: Any) -> None:
    value = make()
    (address,) = (a for a, _ in tree.leaves(value))
    original = tree.get(value, address)
    for mapped in (
        tree.map_tensors(lambda t: t + 1, value),
        tree.put(value, address, lambda t: t + 1),
        tree.with_tensors(value, [torch.ones(1)]),
    ):
        assert mapped is not value
        assert type(mapped) is type(value)
        assert tree.get(mapped, address).item() == 1
    assert tree.get(value, address) is original
    assert original.item() == 0


class Sealing(Holder):
    """Its attribute can be read and not set."""

    @property
    def h(self) -> Any:
        return vars(self)["h"]


class Stubborn(Sealing):
    def __copy__(self) -> Any:
        raise TypeError("no copies")


@pytest.mark.parametrize("kind", [Sealing, Stubborn])
def test_an_object_that_cannot_be_made_again_is_kept_by_reference(kind: type[Sealing]) -> None:
    part = kind(h=torch.zeros(1))
    mapped = tree.map_tensors(lambda t: t + 1, {"part": part, "other": torch.zeros(1)})
    assert mapped["part"] is part
    assert part.h.item() == 0
    assert mapped["other"].item() == 1


# -- what is opened of an object -------------------------------------------------------------------------


def test_attributes_of_a_dataclass_that_are_no_fields_are_opened_where_they_hold_tensors() -> None:
    @dataclasses.dataclass
    class Late:
        a: Tensor

        def __post_init__(self) -> None:
            self.b = self.a * 2
            self.inner = {"c": self.a + 3}
            self.note = "mine"

    value = Late(torch.ones(1))
    kept = tree.map_tensors(torch.clone, value)
    for tensor in (value.a, value.b, value.inner["c"]):
        tensor.zero_()
    assert [kept.a.item(), kept.b.item(), kept.inner["c"].item(), kept.note] == [1, 2, 4, "mine"]
    assert [address for address, _ in tree.leaves(value)] == ["a", "b", "inner.c"]


def test_an_attribute_that_leads_back_to_its_dataclass_stays_as_it_is() -> None:
    value = Box(torch.zeros(1))
    value.parent = Holder(child=value)  # type: ignore[attr-defined]
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert mapped.first.item() == 1
    assert mapped.parent is value.parent  # type: ignore[attr-defined]


def test_only_the_part_that_holds_itself_is_a_leaf() -> None:
    knot: list[Any] = []
    knot.append(knot)
    logger = logging.getLogger("torchhook.test.part")
    value = Holder(h=torch.zeros(1), log=logger, knot=knot, below=Holder(h=torch.zeros(1), log=logger))
    before = dict(vars(logger))
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert [mapped.h.item(), mapped.below.h.item()] == [1, 1]
    assert [value.h.item(), value.below.h.item()] == [0, 0]
    assert mapped.log is mapped.below.log is logger
    assert mapped.knot is knot
    assert vars(logger) == before
    assert dict(tree.leaves(value))["log"] is logger
    assert len(list(tree.tensors(value))) == 2
    assert tree.same_structure(value, mapped)
    assert tree.put(value, "below.h", lambda t: t + 5).below.h.item() == 5
    assert tree.describe(value) == "Holder{h=(1,), log=Logger, knot=list, below=Holder{h=(1,), log=Logger}}"


def test_parts_of_several_loops_never_end_in_a_loop() -> None:
    a, b, c, d = (Holder(h=torch.zeros(1)) for _ in range(4))
    a.b, b.c, c.a, a.d, d.b = b, c, a, d, b
    value = Holder(h=torch.zeros(1), a=a, d=d)
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert mapped.h.item() == 1
    assert mapped.a is a
    assert tree.same_structure(value, mapped)
    for part in (a, b, c, d):
        assert tree.unpack(part) is None


def test_a_chain_too_deep_to_go_through_is_opened_as_far_as_one_goes() -> None:
    value = Holder(h=torch.zeros(1))
    for _ in range(3000):
        value = Holder(h=torch.zeros(1), next=value)
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert [mapped.h.item(), mapped.next.next.h.item(), value.h.item()] == [1, 1, 0]


def test_a_wrong_address_below_an_object_with_a_loop_lists_what_there_is() -> None:
    knot: list[Any] = []
    knot.append(knot)
    value = Holder(part=Holder(h=torch.zeros(1), knot=knot))
    with pytest.raises(KeyError, match="no leaf 'wrong' here; there are: 'h', 'knot'"):
        tree.get(value, "part.wrong")
