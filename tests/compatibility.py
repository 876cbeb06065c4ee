"""What works where: ``docs/compatibility.md``, made from the tests that show it.

A test that shows a row says so: ``@pytest.mark.shows("Checkpointing: edits")``, the area first. One that shows a clear
error, where there is no answer, names it: ``@pytest.mark.shows("TorchScript: values inside", error="SelectorError")``.

``pytest -m shows --compatibility=docs/compatibility.json`` writes down how they end on this torch and this Python, and
``python -m tests.compatibility`` makes the page. This file is a plugin of pytest too, through ``tests/conftest.py``.
"""

from __future__ import annotations

import ast
import json
import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
RECORDED = ROOT / "docs" / "compatibility.json"

Outcomes = dict[str, list[str]]
"""How the cases of each test ended, by its id: ``passed``, ``failed``, ``skipped: why``, ``xfailed: why``."""
Runs = dict[str, Outcomes]
"""The outcomes on each version, which is written ``torch 2.13.0, Python 3.11``."""


class Row(NamedTuple):
    """What is shown, by which tests; the error, where it is shown that there is one."""

    name: str
    error: str | None
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        return self.name.partition(": ")[0]

    @property
    def what(self) -> str:
        return self.name.partition(": ")[2]


# -- which tests show what: read off the sources, without importing any -----------------------------------------------


def rows(folder: Path = ROOT / "tests", root: Path = ROOT) -> list[Row]:
    """Every row that a test in a folder shows, by area and name."""
    found: dict[str, tuple[set[str | None], list[str]]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for test, name, error in _shown_in(ast.parse(path.read_text(encoding="utf-8"))):
            errors, tests = found.setdefault(name, (set(), []))
            errors.add(error)
            tests.append(f"{path.relative_to(root).as_posix()}::{test}")
    return [_row(name, errors, tests) for name, (errors, tests) in sorted(found.items())]


def _row(name: str, errors: set[str | None], tests: list[str]) -> Row:
    if len(errors) > 1:
        raise ValueError(f"{name!r} cannot both work and be an error ({errors}), as its tests say: {tests}")
    if not re.fullmatch(r"[^:|]+: [^|]+", name):
        raise ValueError(f"{name!r} in {tests} is no row: write the area, a colon, and what is shown")
    return Row(name, errors.pop(), tuple(sorted(tests)))


def _shown_in(tree: ast.Module) -> Iterator[tuple[str, str, str | None]]:
    """The tests of a file, with each row and error that their marks name."""
    of_all = [mark for statement in tree.body for mark in _of_module(statement)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for name, error in [*map(_arguments, node.decorator_list), *map(_arguments, of_all)]:
                if name is not None:
                    yield node.name, name, error


def _of_module(statement: ast.stmt) -> list[ast.expr]:
    """The marks that ``pytestmark = …`` puts on every test of a file."""
    if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != "pytestmark":
        return []
    return statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else [statement.value]


def _arguments(mark: ast.expr) -> tuple[str | None, str | None]:
    if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.shows":
        return None, None
    name, *_ = [ast.literal_eval(argument) for argument in mark.args]
    return name, next((ast.literal_eval(k.value) for k in mark.keywords if k.arg == "error"), None)


# -- how they end: a plugin of pytest ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compatibility", metavar="FILE", help="write down how the tests that are marked `shows` end")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--compatibility")
    if file and not hasattr(config, "workerinput"):  # the workers of pytest-xdist tell the first process
        config.pluginmanager.register(Writer(Path(file)))


class Writer:
    """Adds the outcomes of one run to what is recorded in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "shows" in report.keywords and (report.when == "call" or report.outcome != "passed"):
            self.outcomes.setdefault(report.nodeid.partition("[")[0], set()).add(_outcome(report))

    def pytest_sessionfinish(self) -> None:
        runs = read(self.file)
        runs.setdefault(this_version(), {}).update({test: sorted(ends) for test, ends in self.outcomes.items()})
        write(self.file, runs)


def _outcome(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfailed: {report.wasxfail}" if report.outcome == "skipped" else "failed"
    if report.outcome == "skipped":
        return "skipped: " + report.longrepr[2].removeprefix("Skipped: ")
    return str(report.outcome)


def this_version() -> str:
    """What runs here, as it is recorded."""
    torch = metadata.version("torch").partition("+")[0]
    return f"torch {torch}, Python {'.'.join(platform.python_version_tuple()[:2])}"


def read(file: Path) -> Runs:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: Path, runs: Runs) -> None:
    file.write_text(json.dumps(runs, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


# -- the page ---------------------------------------------------------------------------------------------------------

OPENING = """\
# Compatibility

What was tried, by which test, on which versions; this page is made from the tests by `python -m tests.compatibility`.

TorchHook needs Python 3.10 and torch 2.6, or newer. It refuses an older torch when it is imported, and warns of one
that is newer than any below; whoever has checked that, and does not want to be told, says

```python
import warnings

warnings.filterwarnings("ignore", message="torch .* is newer than any")
import torchhook
```

✓ shown on this version · (✓) in part, the rest is under [Limits](#limits) · – not on this version, for a reason that is
given there · blank: not tried. Where there can be no answer, the error that says so is named.
"""


def page(found: list[Row], runs: Runs) -> str:
    """The whole page."""
    versions = sorted(runs, key=_number)
    parts = [OPENING]
    for area in dict.fromkeys(row.area for row in found):
        parts += [f"\n## {area}\n", *_table([row for row in found if row.area == area], versions, runs)]
    limits = list(_limits(found, versions, runs))
    return "\n".join([*parts, "\n## Limits\n", *(limits or ["None that these tests know of."]), ""])


def _table(found: list[Row], versions: list[str], runs: Runs) -> Iterator[str]:
    yield f"| what | shown by | {' | '.join(version.replace(', ', '<br>') for version in versions)} |"
    yield f"|---|---|{':-:|' * len(versions)}"
    for row in found:
        what = row.what if row.error is None else f"{row.what}: a clear error, `{row.error}`"
        cells = [_cell(_ends(row, runs[version])) for version in versions]
        yield f"| {what} | {'<br>'.join(map(_link, row.tests))} | {' | '.join(cells)} |"


def _cell(ends: set[str]) -> str:
    if not ends:
        return ""
    if "failed" in ends:
        return "✗"
    return ("✓" if ends == {"passed"} else "(✓)") if "passed" in ends else "–"


def _ends(row: Row, outcomes: Outcomes) -> set[str]:
    return {end for test in row.tests for end in outcomes.get(test, [])}


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"


def _limits(found: list[Row], versions: list[str], runs: Runs) -> Iterator[str]:
    for version in versions:
        for row in found:
            for end in sorted(_ends(row, runs[version]) - {"passed", "failed"}):
                yield f"- {version}: {row.name}: {end.partition(': ')[2]}"


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _still_shown(runs: Runs, tests: Iterable[str]) -> Runs:
    known = set(tests)
    return {version: {t: ends for t, ends in runs[version].items() if t in known} for version in runs}


def main() -> None:
    """Forget what is recorded of tests that show nothing any more, and make the page."""
    found = rows()
    runs = _still_shown(read(RECORDED), (test for row in found for test in row.tests))
    write(RECORDED, runs)
    PAGE.write_text(page(found, runs), encoding="utf-8")


if __name__ == "__main__":
    main()
