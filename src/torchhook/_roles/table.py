"""What ``roles`` returns: standard names and the sites that they stand for. It prints itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from torchhook._recording.address import Site
from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import MissingRecordError, SelectorError, suggestion

T = TypeVar("T")


class Roles(Mapping[str, Site]):
    """Standard names of a model, without or with their ``@``, and the sites that they stand for.

    ``refused`` has those that could not be shown to be right, each with what was tried; ``eval_only`` those that are
    right in eval mode alone, because the model drops parts of a sum while it trains, say.
    """

    def __init__(self, sites: Mapping[str, Site], refused: Mapping[str, str], model_name: str = "") -> None:
        self.times: dict[Site, set[int]] = {}
        self.sites: dict[str, Site] = dict(sites)
        self.refused: dict[str, str] = dict(refused)
        self.eval_only: dict[str, str] = {}
        self.model_name = model_name

    def __getitem__(self, name: str) -> Site:
        plain = name.removeprefix("@")
        if plain in self.sites:
            return self.sites[plain]
        if plain in self.refused:
            raise SelectorError(f"'@{plain}' is not known to be anywhere in this model: {self.refused[plain]}")
        raise MissingRecordError(f"no role '@{plain}'. {suggestion(f'@{plain}', self)}".rstrip())

    @overload
    def get(self, name: str, default: None = None, /) -> Site | None: ...
    @overload
    def get(self, name: str, default: Site | T, /) -> Site | T: ...
    def get(self, name: str, default: Any = None, /) -> Any:
        """The site of a name, or ``default`` for one that is unknown or refused."""
        # Not as of any mapping: what is refused is no KeyError, so that a selector says why.
        return self.sites.get(name.removeprefix("@"), default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.removeprefix("@") in self.sites

    def __iter__(self) -> Iterator[str]:
        return (f"@{name}" for name in self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def table(self) -> Table:
        """One row for each kind of name: what it stands for in the first and in the last block."""
        kinds: dict[str, list[str]] = {}
        for name in self.sites:
            kinds.setdefault(_kind(name), []).append(name)
        rows = [_row(kind, [self.sites[name] for name in names], names) for kind, names in kinds.items()]
        of = f" of {self.model_name}" if self.model_name else ""
        notes = [*_noted("in eval mode only", self.eval_only), *_noted("refused", self.refused)]
        return Table(f"Roles{of}: {counted(len(self.sites), 'name')}", ["role", "site"], rows, notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _noted(what: str, reasons: Mapping[str, str]) -> list[str]:
    """One line for all the names of a kind that have one reason."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in reasons.items():
        alike.setdefault((_kind(name), _general(why)), []).append(name)
    return [f"{what}: {_range(kind, names)} ({reasons[names[0]]})" for (kind, _), names in alike.items()]


def _kind(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if last.isdecimal() else name


def _general(why: str) -> str:
    return "".join("0" if c.isdecimal() else c for c in why)


def _range(kind: str, names: list[str]) -> str:
    if names == [kind]:
        return f"@{kind}"
    numbers = [int(name.rpartition(".")[2]) for name in names]
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = ", ".join(map(str, numbers)) if not whole else f"{numbers[0]}…{numbers[-1]}"
    return f"@{kind}.{numbers[0] if len(numbers) == 1 else text}"


def _row(kind: str, sites: list[Site], names: list[str]) -> list[str]:
    texts = [site.shown for site in sites]
    starred = {_starred(text, name) for text, name in zip(texts, names, strict=True)}
    if len(starred) == 1:
        return [_range(kind, names), starred.pop()]
    return [_range(kind, names), texts[0] if len(texts) == 1 else f"{texts[0]} … {texts[-1]}"]


def _starred(text: str, name: str) -> str:
    """An address with ``*`` for the number of the block."""
    number = name.rpartition(".")[2]
    return re.sub(rf"(?<=\.){number}(?=[./:]|$)", "*", text, count=1) if number.isdecimal() else text
