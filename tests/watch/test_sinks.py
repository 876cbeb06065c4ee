"""Where statistics go: every destination is told the same."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.watch.helpers import X, hooks_on, mlp
from torchhook._values.histograms import Histogram
from torchhook._watch.api import watch
from torchhook._watch.statistics import DEFAULT


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Any] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        self.histograms[tag, step] = values


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))


def test_all_destinations_are_told_the_same(tmp_path: Path) -> None:
    model, writer, run, calls, path = mlp(), Writer(), Run(), [], tmp_path / "runs" / "watch.csv"
    log = [writer, run, path, lambda step, values: calls.append((step, values))]
    with watch(model, every=2, log=log, statistics=(*DEFAULT, "histogram")) as w:
        for _ in range(3):
            model(X).sum().backward()
    assert run.logged == calls
    assert [step for step, _ in calls] == [0, 2]
    for step, values in calls:
        for tag, value in values.items():
            if isinstance(value, Histogram):
                assert writer.histograms[tag, step].min() >= value.edges[0]
            else:
                assert writer.scalars[tag, step] == value
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(w.last)
    row = next(r for r in rows if r["step"] == "2" and r["site"] == "5")
    assert float(row["mean"]) == w.last["5"]["mean"]
    assert row["update_ratio"] == ""
    assert "histogram" not in row


def test_a_tensorboard_writer_of_its_own_kind_takes_what_it_is_given(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = mlp()
    with tensorboard.SummaryWriter(tmp_path) as writer, watch(model, log=writer, statistics=(*DEFAULT, "histogram")):
        model(X).sum().backward()
    assert any(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_a_raw_histogram_is_handed_over_as_one() -> None:
    taken = {}

    class Raw(Writer):
        def add_histogram_raw(self, tag: str, *numbers: Any, global_step: int) -> None:
            taken[tag] = numbers

    model = mlp()
    with watch(model, "5", log=Raw(), statistics=["histogram"], bins=8):
        output = model(X)
    low, high, number, total, _, limits, counts = taken["5/histogram"]
    assert (low, high) == pytest.approx((output.min().item(), output.max().item()))
    assert number == sum(counts) == 10
    assert len(limits) == 8
    assert total == pytest.approx(output.sum().item(), abs=10 * (high - low) / 16)


def test_a_csv_file_is_continued_with_one_header_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "watch.csv"
    for start in (0, 1):
        with watch(mlp(), "5", log=str(path), parameters=False, start=start) as w:
            model_output = w._engine.watched.index.modules[""](X)
        with path.open("ab") as file:
            file.write(b"7,torn")
    lines = path.read_text().splitlines()
    assert lines[0].startswith("run,step,site,mean,std")
    assert [line.split(",")[:2] for line in lines[1:]] == [["0", "0"], ["7", "torn"], ["1", "1"], ["7", "torn"]]
    assert float(lines[1].split(",")[3]) == pytest.approx(model_output.mean().item(), rel=1e-4)


def test_runs_that_share_a_csv_file_can_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "watch.csv"
    for steps in (2, 1):
        model = mlp()
        with watch(model, "5", log=path, parameters=False):
            for _ in range(steps):
                model(X)
    # Two at once: each is a run of its own, whoever writes last.
    models = mlp(), mlp()
    with watch(models[0], "5", log=path, parameters=False), watch(models[1], "5", log=path, parameters=False):
        for model in (*models, *models):
            model(X)
    with path.open(newline="") as file:
        rows = [(row["run"], row["step"]) for row in csv.DictReader(file)]
    assert rows[:3] == [("0", "0"), ("0", "1"), ("1", "0")]
    assert sorted(rows[3:]) == [("2", "0"), ("2", "1"), ("3", "0"), ("3", "1")]


def test_a_csv_file_without_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("step,site,mean\n0,5,0.1\n")
    with pytest.raises(ValueError, match=r"expected run,step,site,mean, found step,site,mean\. Give another path"):
        watch(mlp(), log=path, statistics=["mean"])


def test_a_csv_file_with_other_columns_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "watch.csv"
    path.write_text("step,site,loss\n")
    model = mlp()
    with pytest.raises(ValueError, match=r"expected run,step,site,mean, found step,site,loss"):
        watch(model, log=path, statistics=["mean"])
    assert hooks_on(model) == 0


def test_a_destination_that_fails_passes_its_own_error_and_no_hook_stays() -> None:
    def fail(step: int, values: Any) -> None:
        raise OSError("disk full")

    model = mlp()
    w = watch(model, log=fail).open()
    model(X)
    with pytest.raises(OSError, match="disk full"):
        w.close()
    assert hooks_on(model) == 0
    w.close()
