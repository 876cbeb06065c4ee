"""The probe of the processor: children that die, live, hang and say nothing, in place of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cpu_isa
from tests.cpu_isa import LIMITS, VARIABLE, needed

ROOT = Path(__file__).parent.parent
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
UNLESS = "import os, signal; os.environ.get({0!r}) in {1!r} or os.kill(os.getpid(), signal.SIGILL)"


def child(code: str, log: Path | None = None) -> list[str]:
    """A command in place of the probe, which notes in ``log`` that it ran."""
    note = "" if log is None else f"open({str(log)!r}, 'a').write('ran\\n')\n"
    return [sys.executable, "-S", "-c", note + code]


def test_a_machine_on_which_torch_lives_needs_nothing() -> None:
    assert needed({}, child("pass"), cache=None) == {}


@pytest.mark.parametrize("position", range(len(LIMITS)), ids=LIMITS)
def test_a_child_that_dies_by_a_signal_gets_the_highest_limit_that_it_survives(position: int) -> None:
    survives = child(UNLESS.format(VARIABLE, LIMITS[position:]))
    assert needed({}, survives, cache=None) == {VARIABLE: LIMITS[position]}


def test_where_no_limit_helps_none_is_set() -> None:
    assert needed({}, child(DIES), cache=None) == {}


def test_a_variable_that_is_given_is_left_alone_and_nothing_is_tried(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert needed({VARIABLE: "SSE41"}, child(DIES, log), cache=None) == {}
    assert not log.exists()


@pytest.mark.parametrize("code", ["raise ImportError", "import time; time.sleep(60)"], ids=["fails", "hangs"])
def test_a_child_that_says_nothing_sets_nothing_and_is_asked_again(tmp_path: Path, code: str) -> None:
    cache = tmp_path / "cache.json"
    assert needed({}, child(code), cache, seconds=2) == {}
    assert not cache.exists()


@pytest.mark.parametrize("code", ["pass", UNLESS.format(VARIABLE, LIMITS[:1])], ids=["lives", "dies"])
def test_the_answer_is_kept_for_this_processor_and_this_torch(tmp_path: Path, code: str) -> None:
    cache, log = tmp_path / "cache.json", tmp_path / "log"
    first = needed({}, child(code, log), cache)
    ran = log.read_text()
    assert needed({}, child(code, log), cache) == first
    assert log.read_text() == ran  # nothing was started

    known = json.loads(cache.read_text())
    cache.write_text(json.dumps({**known, "machine": ["another processor"]}))
    assert needed({}, child(code, log), cache) == first
    assert log.read_text() == ran * 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3', "null"])
def test_a_broken_cache_is_no_answer(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text(text)
    assert needed({}, child("pass"), cache) == {}
    assert json.loads(cache.read_text())["needed"] == {}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    survives = child(UNLESS.format(VARIABLE, LIMITS))
    assert needed({}, survives, tmp_path / "no folder" / "cache.json") == {VARIABLE: LIMITS[0]}


def test_the_real_probe_runs_to_its_end_under_what_it_found() -> None:
    environment = {**os.environ, **needed(os.environ)}
    assert subprocess.run(cpu_isa.COMMAND, env=environment, timeout=cpu_isa.SECONDS).returncode == 0


def test_as_a_script_it_prints_assignments_for_the_makefile() -> None:
    command = [sys.executable, "tests/cpu_isa.py"]
    given = {**os.environ, VARIABLE: "AVX2"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
    assert "env $$($(BIN)/python tests/cpu_isa.py)" in (ROOT / "Makefile").read_text()
