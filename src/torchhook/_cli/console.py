"""Output: tables for people, JSON for scripts, status on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from torchhook._recording.tables import Table


def table(found: Table) -> None:
    """A table, in color where the terminal has colors."""
    console = Console(soft_wrap=True)
    # In a pipe rich takes 80 columns for granted and cuts there, and scripts want whole addresses.
    if not console.is_terminal:
        print(found)
        return
    # Text and not str throughout: in a str, rich reads what is in square brackets as a style and swallows it.
    made = RichTable(title=Text(found.title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for name, right in zip(found.columns, found.right, strict=True):
        made.add_column(Text(name, style="dim"), justify="right" if right else "left", no_wrap=True)
    for row in found.rows:
        made.add_row(*(Text(cell) for cell in row))
    console.print(made, crop=False, overflow="ignore")
    for note in found.notes:
        console.print(Text(note, style="yellow"))


def as_json(value: Any) -> None:
    """JSON that every reader takes: numbers that are not finite become ``null``."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Say what is going on while it takes long, on a terminal only."""
    # stderr, because stdout is for the result: ``--json | jq`` must not meet a spinner.
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield
        return
    with console.status(text):
        yield


def say(text: str) -> None:
    """A line for people, out of the way of what scripts read."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(text))
