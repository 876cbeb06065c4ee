"""What differs between two runs, as sentences: the fields of their manifests, and the facts about code and data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torchhook._words import listed

CHANGES = "(changes as it runs)"
"""Stands for a value that the model or a function changes itself: a counter, a cache. It cannot be compared."""
OBJECT = "an object: "
"""Stands before the class of a value of which no more is known, and which is not called either."""
_DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
_SPANS = {
    "rows": "{} of the data {} read otherwise",
    "contents": "{} of the data {} not the same",
    "files": "{} of the data {} files of other names or contents",
    "ids": "the ids of {} {} others",
    "labels": "the labels of {} {} others",
    "lengths": "the lengths of {} {} others",
}
_VERBS = {"rows": ("is", "are"), "contents": ("is", "are"), "files": ("has", "have")}


def texts(word: str, mine: Any, theirs: Any, same_python: bool = True) -> Iterator[str]:
    """The difference of two values, if they are not the same."""
    one, other = (value if same_python else without_digests(value) for value in (mine, theirs))
    if one == other:
        return
    if isinstance(mine, str) and isinstance(theirs, str) and without_digests(mine) == without_digests(theirs):
        # Two digests tell a reader no more than that they are two.
        yield f"{word}: not the same{_of(without_digests(mine))}"
        return
    yield f"{word}: the store has {_short(_readable(theirs))}, this run {_short(_readable(mine))}"


def model(mine: str, theirs: str, now: Mapping[str, str], before: Mapping[str, str]) -> Iterator[str]:
    """The difference of two models: in their tensors, if they are otherwise the same.

    ``now`` and ``before`` are digests of the tensors by name, where they are known.
    """
    if mine == theirs or without_digests(mine) != without_digests(theirs):
        yield from texts("model", mine, theirs)
        return
    names = [name for name in now if name in before and now[name] != before[name]]
    if names and now.keys() == before.keys():
        yield f"model: other numbers in {len(names)} of {len(now)} tensors ({listed(names)})"
    else:
        yield f"model: {without_digests(mine).rstrip(' …')} in both, and not the same: other numbers or other layers"


def code(mine: Mapping[str, str], theirs: Mapping[str, str], same_python: bool) -> Iterator[str]:
    """Differences in what was read of the code: classes, attributes, values that functions use."""
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name, "(none)"), theirs.get(name, "(none)")
        # Libraries leave private marks on modules, as on those that were loaded rather than made.
        marked = "(none)" in (one, other) and name.rpartition(".")[2].startswith("_")
        # A logger or a trainer that is held on to in one of the two runs.
        held = {one, other} & {"(none)", "None"} and any(text.startswith(OBJECT) for text in (one, other))
        if CHANGES in (one, other) or marked or held:
            continue
        yield from texts(f"code of {name}", one, other, same_python)


def data(mine: Mapping[str, Any], theirs: Mapping[str, Any], accepted: Mapping[str, Any]) -> Iterator[str]:
    """Differences in what was read of the data; what only one of them could tell is not compared.

    ``accepted`` are spans that were repaired since the store was begun.
    """
    # A row that is another one each time it is read says nothing.
    repeats = mine.get("repeats", True) and theirs.get("repeats", True)
    for name in mine:
        if name not in theirs or name == "repeats" or (name == "rows" and not repeats):
            continue
        one, other = mine[name], theirs[name]
        if name not in _SPANS or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            yield from texts(f"data, {name}", one, other)
        else:
            known = accepted.get(name, {})
            if found := [span for span in _differing(one, other) if one[span] != known.get(span)]:
                yield f"data: {_spans(name, found)}"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    # None stands for a row that could not be read: it may be there again.
    return [span for span in one if None not in (one[span], other.get(span)) and one[span] != other[span]]


def repaired(mine: Mapping[str, Any], theirs: Mapping[str, Any], rows: Collection[int]) -> dict[str, dict[str, Any]]:
    """Spans that are not what they were, and have rows which are done again: as they are now."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("files", "contents", "rows"):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            spans = [span for span in _differing(one, other) if _holds(span, rows)]
            found |= {name: {span: one[span] for span in spans}} if spans else {}
    return found


def _holds(span: str, rows: Collection[int]) -> bool:
    first, _, last = span.partition("-")
    return any(int(first) <= row <= int(last or first) for row in rows)


def _spans(name: str, found: list[str]) -> str:
    rows = [span.replace("-", " to ") for span in found]
    told = listed(rows)
    single = len(found) == 1 and "-" not in found[0]
    verb = _VERBS.get(name, ("are", "are"))[not single]
    return _SPANS[name].format(f"row {told}" if single else f"rows {told}", verb)


def without_digests(value: Any) -> Any:
    """A text without the digests of code in it: those of another version of Python say nothing.

    >>> without_digests("scale 0123456789ab [by=2]")
    'scale … [by=2]'
    """
    return _DIGEST.sub("…", value) if isinstance(value, str) else value


def _of(known: str) -> str:
    return f", {known.strip(' …')} in both" if known.strip(" …") else ""


def _readable(value: Any) -> Any:
    return "(a value too long to show)" if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return text if len(text) <= 300 else text[:297] + "…"
