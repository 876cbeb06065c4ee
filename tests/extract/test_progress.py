"""Bars on terminals and in notebooks, lines in pipes, nothing when nothing is wanted."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from torchhook._extract import progress
from torchhook._extract.progress import Progress
from torchhook._extract.writer import Done
from torchhook._features.api import ColumnSpec, Entry, Manifest

MANIFEST = Manifest((ColumnSpec("a", torch.float32, (2,)),), 100, 10, ("a",), "m", "None")


def done(shard, skipped=None):
    return Done(Entry(shard, 10, 5_000_000, "", skipped or {}), True, shard * 10)


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "tqdm", None)
    shown = Progress(MANIFEST, 20, True, "100 rows")
    for shard in range(8):
        now[0] += 10
        shown.rows(10)
        shown.shard(done(shard))
    shown.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "extract: 100 rows"
    assert lines[1] == "extract: 60 of 100 rows, 1.0 rows/s, 0.4 MB/s"
    assert lines[-1] == "extract: 100 of 100 rows, 1.0 rows/s, 0.5 MB/s"
    assert len(lines) == 4


def test_a_stream_has_no_total_and_a_run_with_nothing_to_do_no_last_line(capsys):
    shown = Progress(dataclasses.replace(MANIFEST, rows=None), 0, True, "rows")
    shown.rows(7)
    shown.close()
    Progress(MANIFEST, 100, True, "nothing to do").close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("extract: 7 rows, ")
    assert lines[2:] == ["extract: nothing to do"]


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_what_can_be_drawn_over_gets_a_bar(capsys, monkeypatch, where):
    if where == "terminal":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    else:
        monkeypatch.setattr(type(sys.stderr), "__module__", "ipykernel.iostream")
    shown = Progress(MANIFEST, 0, True, "100 rows")
    shown.rows(100)
    shown.shard(done(0, {"3": "broken"}))
    shown.close()
    err = capsys.readouterr().err
    assert "100%|" in err
    assert "1 row skipped in shard 0; row 3: broken" in err


def test_nothing_is_said_but_what_was_skipped(capsys):
    shown = Progress(MANIFEST, 0, False, "100 rows")
    shown.rows(100)
    shown.shard(done(2, {"3": "broken", "4": "worse"}))
    shown.close()
    assert capsys.readouterr().err == "extract: 2 rows skipped in shard 2; row 23: broken\n"
