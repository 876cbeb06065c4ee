"""Rows of a benchmark: printed as they come, written as JSON with the machine, the versions and the commit."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "captum",
    "nnsight",
    "transformer-lens",
    "torchlens",
    "torch-featurelayer",
    "grad-cam",
    "torchcam",
    "datasets",
    "numpy",
}


@dataclasses.dataclass
class Row:
    """One way of doing one piece of work, as a ratio to the plain way in the same run."""

    work: str
    way: str
    ratio: float | None
    must: float | None = None
    aim: float | None = None
    wrong: int | None = None
    values: int | None = None
    note: str = ""
    column: str = ""
    """Where one table holds many: the column of this one."""
    more_is_better: bool = False
    low: float | None = None
    """Half of the rounds are between this and ``high``."""
    high: float | None = None

    @property
    def verdict(self) -> str:
        """Whether what must be reached is reached; nothing where nothing must be."""
        if self.must is None:
            return ""
        if self.ratio is None:
            return "NOT MEASURED"
        if self._reaches(self.aim):
            return "aim reached"
        return "reached" if self._reaches(self.must) else "MISSED"

    def _reaches(self, goal: float | None) -> bool:
        if goal is None or self.ratio is None:
            return False
        # As it is printed: 1.0299 is not told from 1.03.
        ratio = round(self.ratio, 2)
        return ratio >= goal if self.more_is_better else ratio <= goal

    def cells(self) -> list[str]:
        wrong = "" if self.wrong is None else f"{self.wrong} of {self.values}"
        ratio = "" if self.ratio is None else shown(self.ratio)
        return [self.way, ratio, goal(self.must), goal(self.aim), self.verdict, wrong, self.note]


COLUMNS = ["way", "ratio", "must reach", "aim", "", "wrong values", ""]


def shown(ratio: float) -> str:
    """Three decimals near 1, fewer where they would say nothing."""
    return f"{ratio:.3f}" if ratio < 2 else f"{ratio:.2f}" if ratio < 20 else f"{ratio:,.0f}"


def goal(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


class Report:
    """The rows of one program, printed as they come and saved after each piece of work."""

    def __init__(self, title: str, path: Path | None = None) -> None:
        self.title, self.path = title, path
        self.rows: list[Row] = []
        self.facts: list[str] = []
        self._work = ""

    def add(self, *rows: Row) -> None:
        for row in rows:
            title = f"{row.work}: {row.column}" if row.column else row.work
            if title != self._work:
                print(f"\n{title}", flush=True)
                self._work = title
            way, ratio, must, aim, verdict, wrong, note = row.cells()
            goals = f"must {must:<5} aim {aim:<5} {verdict}" if must else ""
            wrong = f"{wrong} wrong" if wrong else ""
            between = f"{shown(row.low)}–{shown(row.high)}" if row.low is not None and row.high is not None else ""
            print(f"  {way:<44}{ratio:>8} {between:<13} {goals:<34} {wrong:<18} {note}".rstrip(), flush=True)
            self.rows.append(row)
        self.save()

    def fact(self, text: str) -> None:
        """Something found out that is no ratio: a fit, a size."""
        print(f"  {text}", flush=True)
        self.facts.append(text)
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        found = {
            "title": self.title,
            "environment": environment(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "facts": self.facts,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.verdict in ("MISSED", "NOT MEASURED") or (row.wrong and row.must)]

    def close(self) -> None:
        """Say at the end what is missed."""
        for row in self.missed:
            found = "nothing" if row.ratio is None else shown(row.ratio)
            print(f"missed: {row.work}: {row.way}: {found}, must reach {goal(row.must)} {row.note}".rstrip())
        wrong = sum(row.wrong or 0 for row in self.rows if row.must is not None)
        print(f"\n{self.title}: {len(self.missed)} missed, {wrong} wrong values in rows that must hold")


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What ``Report.save`` wrote: the whole of it, and its rows."""
    found = json.loads(path.read_text())
    return found, [Row(**row) for row in found["rows"]]


@functools.cache
def environment() -> dict[str, Any]:
    import torch

    machine = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}; {machine}"
    return {
        "machine": machine,
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    installed = importlib.metadata.distributions()
    found = {item.metadata["Name"].lower().replace("_", "-"): item.version for item in installed}
    return {name: version for name, version in sorted(found.items()) if name in PACKAGES}


def commit() -> str:
    """The commit that was measured, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "src")
        return git("rev-parse", "--short", "HEAD").strip() + (" with changes" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
