"""The page of what works where is made from the tests that show it, and from how they ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compatibility
from tests.compatibility import PAGE, RECORDED, ROOT, Row, page, read, rows, this_version
from torchhook._torch import releases

SAMPLE = """
import pytest
pytestmark = [pytest.mark.shows("All: of this file")]

@pytest.mark.shows("Area: what is shown")
@pytest.mark.parametrize("case", range(3))
def test_of_several_cases(case):
    if case == 1:
        pytest.skip("not this one")

@pytest.mark.shows("Area: what is refused", error="SomeError")
@pytest.mark.shows("Other: the same test")
def test_that_fails():
    assert False

@pytest.mark.xfail(reason="a defect of torch 1.0", strict=True)
def test_that_is_known_to_fail():
    raise ValueError

def helper():
    pass
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_sample.py").write_text(SAMPLE)
    return folder


def test_the_tests_that_show_a_row_are_read_off_the_sources(sample: Path) -> None:
    file = "tests/test_sample.py::"
    tests = [file + name for name in ("test_of_several_cases", "test_that_fails", "test_that_is_known_to_fail")]
    assert rows(sample, sample.parent) == [
        Row("All: of this file", None, tuple(tests)),
        Row("Area: what is refused", "SomeError", (tests[1],)),
        Row("Area: what is shown", None, (tests[0],)),
        Row("Other: the same test", None, (tests[1],)),
    ]


def test_what_pytest_finds_marked_is_what_is_read(request: pytest.FixtureRequest) -> None:
    """By the tests of this run, however many those are."""
    items = [item for item in request.session.items if item.nodeid.startswith("tests/")]
    found = {
        (str(mark.args[0]), item.nodeid.partition("[")[0]) for item in items for mark in item.iter_markers("shows")
    }
    collected = {nodeid for _, nodeid in found}
    assert found == {(row.name, test) for row in rows() for test in row.tests if test in collected}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_adds_how_the_marked_tests_ended_to_what_is_recorded(sample: Path, workers: int) -> None:
    file = sample.parent / "recorded.json"
    file.write_text(json.dumps({"torch 1.0.0, Python 3.0": {"tests/a.py::test_b": ["passed"]}}))
    command = [sys.executable, "-m", "pytest", "-p", "tests.compatibility", "--compatibility", str(file), "-n", workers]
    at_home = "import sys; sys.path.insert(0, sys.argv[1]); import pytest; pytest.main(sys.argv[2:])"
    command[1:3] = ["-c", at_home, str(ROOT)]
    subprocess.run([*map(str, command), "-q", "tests"], cwd=sample.parent, capture_output=True, timeout=300)
    assert read(file) == {
        "torch 1.0.0, Python 3.0": {"tests/a.py::test_b": ["passed"]},
        this_version(): {
            "tests/test_sample.py::test_of_several_cases": ["passed", "skipped: not this one"],
            "tests/test_sample.py::test_that_fails": ["failed"],
            "tests/test_sample.py::test_that_is_known_to_fail": ["xfailed: a defect of torch 1.0"],
        },
    }


def test_a_row_is_shown_in_full_in_part_not_at_all_or_was_not_tried() -> None:
    found = [
        Row("A: works", None, ("tests/t.py::test_it_works", "tests/u.py::test_too")),
        Row("A: no", "NoError", ("tests/t.py::test_no",)),
    ]
    old, new = "torch 2.9.1, Python 3.10", "torch 2.10.0, Python 3.13"
    text = page(
        found,
        {
            new: {"tests/t.py::test_it_works": ["passed"], "tests/u.py::test_too": ["passed", "xfailed: its defect"]},
            old: {"tests/t.py::test_it_works": ["passed"], "tests/t.py::test_no": ["skipped: no such thing"]},
        },
    )
    assert "| torch 2.9.1<br>Python 3.10 | torch 2.10.0<br>Python 3.13 |" in text  # by number, not by letter
    assert "| works | [it works](../tests/t.py)<br>[too](../tests/u.py) | ✓ | (✓) |" in text
    assert "| no: a clear error, `NoError` | [no](../tests/t.py) | – |  |" in text
    assert text.endswith(
        "## Limits\n\n- torch 2.9.1, Python 3.10: A: no: no such thing\n"
        "- torch 2.10.0, Python 3.13: A: works: its defect\n"
    )
    assert "| ✗ |" in page(found[1:], {new: {"tests/t.py::test_no": ["failed"]}})


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ('@pytest.mark.shows("no area")\ndef test_a(): ...', "is no row"),
        (
            '@pytest.mark.shows("A: b")\ndef test_a(): ...\n@pytest.mark.shows("A: b", error="E")\ndef test_b(): ...',
            "cannot both work and be an error",
        ),
    ],
)
def test_a_mark_that_cannot_be_shown_is_refused(tmp_path: Path, mark: str, said: str) -> None:
    (tmp_path / "test_it.py").write_text(mark)
    with pytest.raises(ValueError, match=said):
        rows(tmp_path, tmp_path)


# -- the page itself --------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_tests_and_their_record_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(rows(), read(RECORDED)), "run: python -m tests.compatibility"


def test_every_row_was_shown_on_the_torch_that_is_pinned() -> None:
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    runs = [outcomes for version, outcomes in read(RECORDED).items() if version.startswith(f"torch {pinned},")]
    passed = {test for outcomes in runs for test, ends in outcomes.items() if "passed" in ends}
    unseen = {row.name: row.tests for row in rows() if not passed.issuperset(row.tests)}
    assert unseen == {}, "run: pytest -m shows --compatibility=docs/compatibility.json; python -m tests.compatibility"


def test_nothing_that_is_recorded_failed() -> None:
    failed = {(v, t) for v, outcomes in read(RECORDED).items() for t, ends in outcomes.items() if "failed" in ends}
    assert failed == set()


def test_the_newest_torch_on_the_page_is_the_newest_that_is_not_warned_of() -> None:
    newest = max(tuple(compatibility._number(version)[:2]) for version in read(RECORDED))
    assert newest == releases.NEWEST_TESTED
