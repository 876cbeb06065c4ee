"""Which site of A belongs to which of B."""

from __future__ import annotations

from typing import Any

import pytest

from torchhook._recording.address import Site, parse
from torchhook._recording.counterparts import Counterparts
from torchhook.errors import MissingRecordError

A = ["", "stem", "h.0", "h.0.attn", "h.1", "relu"]
B = ["", "first", "blocks.0", "blocks.1", "attention", "act1", "act2"]


def of(names: Any, address: str) -> str | None:
    return Counterparts(names, A, B).of(parse(address, A))


@pytest.mark.parametrize(
    ("names", "address", "other"),
    [
        (None, "stem:input", "stem:input"),
        ({"stem": "first"}, "stem:input", "first:input"),
        ({"h": "blocks"}, "h.1#2", "blocks.1#2"),
        ({"h": "blocks", "h.0.attn": "attention"}, "h.0.attn", "attention"),
        ({"h": "blocks"}, "relu", "relu"),
        ({"relu#0": "act1", "relu#1": "act2"}, "relu#1", "act2"),
        ({"relu:input": "act1"}, "relu#1:input", "act1#1"),
        ({"stem": None}, "stem", None),
        ({"(model)": "first"}, "", "first"),
        ({"": "first"}, ":input", "first:input"),
        ({"stem": "(model)"}, "stem#0", "#0"),
        (lambda path: path.replace("h.", "blocks."), "h.0:grad", "blocks.0:grad"),
        (lambda path: None, "stem", None),
        (lambda path: "(model)", "stem:input", ":input"),
    ],
)
def test_the_counterpart_of_a_site(names: Any, address: str, other: str | None) -> None:
    assert of(names, address) == other


def test_every_counterpart_of_a_site_is_found_whatever_the_call() -> None:
    found = Counterparts({"relu#0": "act1", "relu#1": "act2"}, A, B).all_of(Site("relu"))
    assert found == ["relu", "act1", "act2"]


def test_a_name_that_is_no_site_is_refused_with_the_closest() -> None:
    counterparts = Counterparts({"stam": "first"}, A, B)
    with pytest.raises(MissingRecordError, match=r"^names: 'stam' is no site of A\. Closest: 'stem'"):
        counterparts.check_used([Site("stem", call=0)])
    Counterparts({"stem": "first"}, A, B).check_used([Site("stem", call=0)])


def test_names_are_a_dict_or_a_function() -> None:
    with pytest.raises(TypeError, match="names= is a dict of names or a function of a name, found list"):
        Counterparts(["stem"], A, B)  # type: ignore[arg-type]
