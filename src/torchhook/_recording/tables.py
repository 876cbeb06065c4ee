"""Small tables as plain text and as HTML, for everything that prints itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence

_STYLE = (
    "border-collapse:collapse;font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:12px;line-height:1.5"
)


_WIDEST = 96  # a name of six levels fits; what a value holds, or a sentence, may not


class Table:
    """A title, columns and rows of text. Columns whose title starts with ``>`` are set right, long cells are cut.

    Without a title for any column there is no head.

    >>> print(Table("Sizes", ["name", ">size"], [["a", "1"], ["b", "20"]]))
    Sizes
    name  size
    ----------
    a        1
    b       20
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
    ) -> None:
        self.title = title
        self.columns: list[str] = [c.removeprefix(">") for c in columns]
        self.right: list[bool] = [c.startswith(">") for c in columns]
        self.rows: list[list[str]] = [[str(cell) for cell in row] for row in rows]
        self.notes: list[str] = list(notes)

    def __str__(self) -> str:
        cells = [[capped(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            set_ = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, self.right, strict=True))
            return "  ".join(set_).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        head = [self.title] if self.title else []
        columns = [line(cells[0]), rule] if any(self.columns) else []
        return "\n".join([*head, *columns, *map(line, cells[1:]), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # white-space:pre, since HTML drops the blanks that layers are indented with.
        def cells(row: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align:{"right" if right else "left"};padding:1px 10px 1px 0;white-space:pre"'
                # Whole, for the pointer that rests on a cell that was cut.
                f"{'' if capped(cell) == cell else f' title={chr(34)}{html.escape(cell)}{chr(34)}'}>"
                f"{html.escape(capped(cell))}</{tag}>"
                for cell, right in zip(row, self.right, strict=True)
            )

        head = f"<thead><tr>{cells(self.columns, 'th')}</tr></thead>" if any(self.columns) else ""
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        table = f'<table style="{_STYLE}">{head}<tbody>{body}</tbody></table>' if head or body else ""
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return (
            f'<div class="torchhook" style="overflow-x:auto"><div><b>{html.escape(self.title)}</b></div>'
            f"{table}{notes}</div>"
        )


def facts(title: str, told: Mapping[str, object], notes: Iterable[str] = ()) -> Table:
    """What there is to say of one thing, a line each.

    >>> print(facts("Clip", {"limit": 0.5, "state": "open"}))
    Clip
    limit  0.5
    state  open
    """
    return Table(title, ["", ""], [[name, str(value)] for name, value in told.items()], notes)


def picture(png: bytes, text: str) -> str:
    """A picture beside a table, as HTML that needs no file; ``text`` is for those who cannot see it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<img class="torchhook" src="{source}" alt="{html.escape(text)}" style="max-width:100%">'


def capped(text: str, width: int = _WIDEST) -> str:
    """A cell that fits: the middle gives way, since names differ at their ends.

    >>> capped("encoder.layers.11.attention.query", 17)
    'encoder.l…n.query'
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2 - (width - 1) // 12
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def digits(number: float | None) -> str:
    """A number by its first digits, and a dash where there is none.

    >>> digits(0.123456), digits(None)
    ('0.1235', '-')
    """
    return "-" if number is None else f"{number:.4g}"


def fixed(number: float, places: int) -> str:
    """A number with so many decimal places; what rounds to nothing has no sign.

    >>> fixed(-0.00004, 3), fixed(-1.5, 1)
    ('0.000', '-1.5')
    """
    return f"{round(number, places) + 0.0:.{places}f}"


def count(number: float, precision: int = 2) -> str:
    """A number in thousands, millions, …

    >>> count(11689512)
    '11.69 M'
    """
    units = ["", "K", "M", "G", "T"]
    # Rounded first, or 999,999 would be 1000.00 K.
    while round(abs(number), precision) >= 1000 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.{precision}f} {units[0]}"


def size(nbytes: float) -> str:
    """Bytes as people read them.

    >>> size(3211264)
    '3.1 MiB'
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(nbytes) >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.1f} {units[0]}"
