"""The code around the benchmarks: what they print, write and judge. Nothing is timed here."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import torchhook as th

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, ModuleType]:
    # Scripts import each other by their bare names, as Python's path has it when one of them is run.
    sys.path.insert(0, str(FOLDER))
    try:
        names = ["timing", "bare", "results", "write_readme", "capture", "models", "ways", "run"]
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))


# -- judging -------------------------------------------------------------------------------------------------------


def overwriting() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).eval()


def test_the_judge_finds_the_value_that_the_next_layer_overwrote(benchmarks: dict[str, ModuleType]) -> None:
    bare, model, x = benchmarks["bare"], overwriting(), torch.randn(3, 4)
    with bare.Bare(model, ["0", "2"], lambda tensor: tensor) as naive:
        model(x)
    with bare.Bare(model, ["0", "2"]) as true:
        model(x)
    assert bare.count_wrong(lambda name: naive.store[name], true.store) == (1, 2)
    assert bare.judged(model, ["0", "2"], th.capture(model, "0", "2"), lambda: model(x)) == (0, 2)


def test_what_is_missing_of_a_session_is_wrong(benchmarks: dict[str, ModuleType]) -> None:
    count = benchmarks["bare"].count_wrong
    assert count(lambda name: [], {"0": [[torch.ones(1)]]}) == (1, 1)
    assert count(lambda name: [torch.ones(2)], {"0": [[torch.ones(1)]]}) == (1, 1)
    nan = torch.tensor([float("nan"), 1.0])
    assert count(lambda name: [nan.clone()], {"0": [[nan]]}) == (0, 1)


def test_a_peer_may_leave_calls_out_but_not_give_other_values(benchmarks: dict[str, ModuleType]) -> None:
    judge = benchmarks["capture"].judge
    first, second = torch.zeros(2), torch.ones(2)
    truth = {"relu": [[first], [second]]}
    assert judge({"relu": [second]}, truth) == (0, 1, 1)
    assert judge({"relu": [second, first]}, truth) == (2, 2, 0)
    assert judge({"relu": [torch.full((2,), 7.0)]}, truth) == (1, 1, 1)
    assert judge({}, truth) == (0, 0, 2)


def test_every_way_without_a_package_of_its_own_gives_what_bare_hooks_give(benchmarks: dict[str, ModuleType]) -> None:
    ways, models = benchmarks["ways"], benchmarks["models"]
    work = models.Work("toy", overwriting(), (torch.randn(3, 4),), "0", ["0", "1"])
    assert work.all == ["0", "1", "2"]
    for way in ("bare hooks, clone", "torchhook"):
        for mode, make in ways.WAYS[way].items():
            truth = ways.bare_gradients if mode == "gradients" else ways.bare_per_call
            true = truth(ways.own_copy(work), work.all)()
            run = make(ways.own_copy(work), work.all)
            run()
            # Twice: what is held starts afresh with each call.
            assert benchmarks["capture"].judge(run(), true) == (0, 3, 0), (way, mode)


# -- timing --------------------------------------------------------------------------------------------------------


def test_medians_are_those_of_the_turns_by_a_clock_that_is_made_up(benchmarks: dict[str, ModuleType]) -> None:
    now = 0.0

    def costs(seconds: float) -> object:
        def run() -> None:
            nonlocal now
            now += seconds

        return run

    runs = {"fast": costs(1), "slow": costs(3), "very slow": costs(50)}
    rounds = benchmarks["timing"].measure(runs, rounds=10, repeat=2, clock=lambda: now)
    assert all(times.get(name, cost) == cost for times in rounds for name, cost in (("fast", 1), ("very slow", 50)))
    # Those that are much slower have fewer turns, and not fewer than three, when the others have had theirs.
    assert [set(times) for times in rounds] == [{"fast", "slow"}] * 10 + [{"fast", "very slow"}] * 3
    assert benchmarks["timing"].compare(runs, rounds=3, clock=lambda: now) == {"fast": 1, "slow": 3, "very slow": 50}


def test_who_stays_open_is_opened_for_its_turns_and_its_first_call_there_does_not_count(
    benchmarks: dict[str, ModuleType],
) -> None:
    now, opened, log = 0.0, 0, list[str]()

    @contextlib.contextmanager
    def opens() -> Iterator[None]:
        nonlocal now, opened
        now, opened = now + 100, 1
        yield
        opened = 0

    def costs(name: str, seconds: float) -> Callable[[], None]:
        calls = 0

        def run() -> None:
            nonlocal now, calls
            calls += 1
            log.append(f"{name} {opened}")
            now += seconds

        return run

    held = benchmarks["timing"].Held(opens, costs("held", 2))
    found = benchmarks["timing"].measure({"plain": costs("plain", 1), "held": held}, 5, 3, clock=lambda: now)
    assert found == [{"plain": 1, "held": 2}] * 5
    assert set(log) == {"plain 0", "held 1"}
    assert log.count("held 1") == 2 + 3 + 5 * (1 + 3)


def test_ratios_are_taken_within_a_round(benchmarks: dict[str, ModuleType]) -> None:
    now, speed = 0.0, 1.0

    def costs(seconds: float) -> object:
        def run() -> None:
            nonlocal now, speed
            now += seconds * speed
            speed *= 1.001  # a machine that gets slower

        return run

    found = benchmarks["timing"].ratios({"plain": costs(1), "twice": costs(2)}, rounds=50, repeat=1, clock=lambda: now)
    assert found["plain"].median == 1
    assert abs(found["twice"].median - 2) < 0.01
    assert found["twice"].low <= found["twice"].median <= found["twice"].high


def test_a_line_has_what_one_more_costs_and_what_none_would(benchmarks: dict[str, ModuleType]) -> None:
    slope, rest = benchmarks["timing"].line({1: 12.0, 2: 14.0, 10: 30.0})
    assert (round(slope, 6), round(rest, 6)) == (2, 10)


def test_what_must_hold_is_the_median_of_processes_and_not_the_luckiest(benchmarks: dict[str, ModuleType]) -> None:
    Row, together = benchmarks["results"].Row, benchmarks["capture"].together
    runs = [
        [Row("w", "plain", 1.0), Row("w", "ours", ratio, 1.15, None, wrong, 9, low=ratio - 0.1, high=ratio + 0.1)]
        for ratio, wrong in ((1.2, 0), (1.08, 0), (1.16, 2), (1.3, 0), (1.11, 0))
    ]
    plain, ours = together(runs)
    assert (plain.ratio, plain.low) == (1.0, None)
    assert (ours.ratio, ours.verdict, ours.wrong, ours.values) == (1.16, "MISSED", 2, 9)
    assert (round(ours.low, 6), round(ours.high, 6)) == (1.06, 1.26)
    # A process that failed leaves a row of its own, and the figures of the others.
    failed = Row("not measured", "limits", None, note="killed")
    assert together([*runs[:3], [failed]])[-1] == failed


# -- tables --------------------------------------------------------------------------------------------------------


def test_a_row_says_whether_what_must_be_reached_is(benchmarks: dict[str, ModuleType]) -> None:
    Row = benchmarks["results"].Row
    assert Row("w", "a", 1.02, 1.03, 1.01).verdict == "reached"
    assert Row("w", "a", 1.0, 1.03, 1.01).verdict == "aim reached"
    assert Row("w", "a", 1.04, 1.03, 1.01).verdict == "MISSED"
    assert Row("w", "a", 0.94, 0.93, 0.97, more_is_better=True).verdict == "reached"
    assert Row("w", "a", 0.5, 0.93, 0.97, more_is_better=True).verdict == "MISSED"
    assert Row("w", "a", None, 1.03).verdict == "NOT MEASURED"
    assert Row("w", "a", 9.0).verdict == ""


def test_wrong_values_are_missed_goals_however_fast(
    benchmarks: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = benchmarks["results"]
    report = results.Report("toy", tmp_path / "toy.json")
    report.add(results.Row("work", "fast", 1.0, 1.1, None, 2, 5), results.Row("work", "plain", 1.0))
    assert [row.way for row in report.missed] == ["fast"]
    report.fact("a line")
    found, rows = results.load(tmp_path / "toy.json")
    assert rows == report.rows
    assert found["facts"] == ["a line"]
    assert {"machine", "python", "versions", "commit"} <= set(found["environment"])
    assert found["environment"]["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    report.close()
    assert "2 of 5 wrong" in capsys.readouterr().out


def test_the_page_has_every_row_with_its_wrong_values_and_its_origin(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, writer = benchmarks["results"], benchmarks["write_readme"]
    monkeypatch.setattr(writer, "RESULTS", tmp_path)
    report = results.Report("toy", tmp_path / "capture.json")
    report.add(
        results.Row("Limit of h.*.attn", "ours", 1.5, 1.15, None, 0, 3, low=1.4, high=1.6),
        results.Row("ResNet-18", "peer", 1.25, wrong=17, values=67, column="all, per call"),
        results.Row("ResNet-18", "peer", None, column="one, held", note="TraceError: a | b"),
    )
    (tmp_path / "watch.json").write_text(json.dumps({"results": [{"kind": "every=1", "ratio": 1.5, "limit": 1.6}]}))
    (tmp_path / "extract.json").write_text(
        json.dumps({"environment": found_environment(), "found": {"disk": {"raw": 0.5}}})
    )
    page = writer.readme()
    assert "| ours | 1.500 | 1.400–1.600 | 1.15 | MISSED | 0 of 3 |" in page
    assert "**Limit of h.\\*.attn**\n" in page
    assert "| peer | 1.250 (**17 of 67 wrong**) | fails |" in page
    assert "- peer: TraceError: a | b" in page
    assert "| every=1 | 1.500 | 1.600 |" in page
    assert "| raw | 0.500 |" in page
    assert "a machine; Python 3; torch 1; commit abc." in page


# What the programs with a form of their own write, before run.py adds the machine.
OWN_FORMS = {
    "watch": {"title": "t", "results": [{"kind": "every=1", "ratio_in_a_row": None, "processor_ratio": 1.75}]},
    "guard": {"title": "t", "results": [{"work": "GPT-2", "milliseconds": 9.0, "guard": 1.75, "bare flags": 2.0}]},
    "sweep": {"torch": "1", "results": [{"model": "tiny", "by hand (s)": 9.0, "ratio": 1.75, "notes": []}]},
    "extract": {"From rest: 9 rows": {"raw write": 1.75}, "Requests": {"open": 3}},
}


def test_every_program_that_runs_has_its_place_on_the_page(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, writer, run = benchmarks["results"], benchmarks["write_readme"], benchmarks["run"]
    monkeypatch.setattr(writer, "RESULTS", tmp_path)
    names = [name for name in [*run.BESIDE_PEERS, *run.ALONE] if name != "hotspots"]  # at the end, in words
    assert OWN_FORMS.keys() == set(run.ALONE) - {"stream"}
    assert [name for name in names if not (FOLDER / f"{name}.py").exists()] == []
    for name in names:
        path = tmp_path / f"{name}.json"
        if name in OWN_FORMS:
            path.write_text(json.dumps(OWN_FORMS[name]))
            run.add_environment(path)
        else:
            results.Report(name, path).add(results.Row("work", "way", 1.75, low=1.5, high=1.875))
        page = writer.readme()
        assert f"## {writer.TITLES[name]}\n" in page, name
        assert "| 1.750 |" in page, name
        assert f"commit {results.commit()}." in page, name
        assert "{" not in page, name
        path.unlink()


def test_tables_of_the_page_have_only_columns_that_say_something(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = benchmarks["write_readme"]
    monkeypatch.setattr(writer, "RESULTS", tmp_path)
    for name, found in OWN_FORMS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    page = writer.readme()
    assert "| kind | processor ratio |" in page
    assert "| work | guard | bare flags |" in page
    assert "|  | count |\n|---|---|\n| open | 3 |" in page


def found_environment() -> dict[str, object]:
    return {"machine": "a machine", "python": "3", "versions": {"torch": "1"}, "commit": "abc"}


def test_the_page_in_the_repository_is_the_one_that_its_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    writer = benchmarks["write_readme"]
    assert writer.README.read_text() == writer.readme(), "run: python benchmarks/write_readme.py"


def test_the_numbers_of_the_front_page_are_those_of_the_results(benchmarks: dict[str, ModuleType]) -> None:
    writer = benchmarks["write_readme"]
    page = writer.FRONT.read_text()
    assert page == writer.front(page), "run: python benchmarks/write_readme.py"
    # By hand, from the file itself: the line of the wrong values.
    rows = json.loads((writer.RESULTS / "capture.json").read_text())["rows"]
    ours = [row for row in rows if (row["work"], row["way"]) == ("ResNet-18", "torchhook")]
    [row] = [row for row in ours if row["column"] == "all, per call"]
    assert f"| wrong values, all layers of ResNet-18 | {row['wrong']} of {row['values']} |" in page
    assert f"| cost, all layers of ResNet-18 | {row['ratio']:.2f} |" in page


def test_a_front_page_without_its_lines_is_an_error(benchmarks: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match="unpack"):
        benchmarks["write_readme"].front("# A page\n")


def test_the_programs_say_what_they_are_and_parse() -> None:
    import ast

    for path in FOLDER.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path.name
