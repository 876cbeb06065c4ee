"""Tables as text and HTML, and the numbers in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook._recording.tables import Table, count, size

patient = settings(deadline=None)  # the machine may be busy

CELLS = st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=8)


class Cells(HTMLParser):
    """Reads a table back out of HTML, as a browser would."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1][-1] += data


def test_a_table_prints_title_columns_rule_rows_and_notes() -> None:
    table = Table("Sizes", ["name", ">size", "kind"], [["a", "1", "x"], ["long name", "2000", ""]], ["a note"])
    assert str(table) == (
        "Sizes\n"
        "name       size  kind\n"
        "---------------------\n"
        "a             1  x\n"
        "long name  2000\n"
        "a note"
    )  # fmt: skip


def test_a_table_without_title_or_rows_is_its_head() -> None:
    assert str(Table("", ["name", ">n"], [])) == "name  n\n-------"


def test_cells_that_are_not_text_are_shown_as_text() -> None:
    assert str(Table("", ["n"], [[3]])).splitlines()[-1] == "3"  # type: ignore[list-item]


@patient
@given(st.lists(st.tuples(CELLS, CELLS), max_size=5))
def test_columns_line_up_whatever_the_cells_hold(rows: list[tuple[str, str]]) -> None:
    lines = str(Table("", ["left", ">right"], rows)).split("\n")
    width = max([4, *(len(a) for a, _ in rows)])
    for line, (left, right) in zip(lines[2:], rows, strict=True):
        assert line == (left.ljust(width) + "  " + right.rjust(len(lines[1]) - width - 2)).rstrip()


@patient
@given(st.lists(st.tuples(CELLS, CELLS), max_size=4), CELLS)
def test_html_shows_every_cell_as_written_and_opens_no_tag_of_its_contents(rows: list[tuple[str, str]], title: str):
    columns = ["<b>", "a&b"]
    shown = Cells(Table(title, columns, rows, [title])._repr_html_())
    assert shown.rows == [columns, *map(list, rows)]
    assert set(shown.tags) <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}


def test_html_sets_numbers_to_the_right() -> None:
    assert re.findall(r"<t[hd] style=\"text-align:(\w+)", Table("", ["a", ">b"], [["x", "y"]])._repr_html_()) == [
        "left",
        "right",
        "left",
        "right",
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1000, "1.00 K"),
        (11689512, "11.69 M"),
        (6_738_415_616, "6.74 G"),
        (1.8e12, "1.80 T"),
        (5e16, "50000.00 T"),
        (-2500, "-2.50 K"),
    ],
)
def test_count_reads_in_thousands(number: float, text: str) -> None:
    assert count(number) == text


def test_small_numbers_have_no_unit() -> None:
    assert [float(count(n)) for n in (0, 9, 999)] == [0, 9, 999]


def test_count_takes_a_precision() -> None:
    assert count(11689512, 0) == "12 M"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3211264, "3.1 MiB"), (2**30, "1.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_size_reads_in_powers_of_1024(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@patient
@given(st.integers(0, 2**50))
def test_size_and_count_stay_within_one_percent_of_the_number(number: int) -> None:
    value, unit = size(number).split(" ")
    assert abs(float(value) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit) - number) <= 0.05 * number
    value, unit = count(number).split(" ")
    assert abs(float(value) * 1000 ** ["", "K", "M", "G", "T"].index(unit) - number) <= 0.01 * number


def test_a_cell_that_is_too_long_gives_way_in_its_middle() -> None:
    name, text = "transformer." * 20 + "attn", "x" * 600
    table = Table("Wide", ["name", "text", ">n"], [[name, text, "1"], ["a", "b", "2"]])
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 2 * 96 + 5
    assert lines[3].startswith("transformer.")
    assert "former.attn  xxx" in lines[3]
    assert f'title="{text}"' in table._repr_html_()
    assert Cells(table._repr_html_()).rows[1][1] == f"{'x' * 55}…{'x' * 40}"
    # As it was given, for whoever reads the rows.
    assert table.rows[0] == [name, text, "1"]
