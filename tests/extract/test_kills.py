"""The hunt itself: it finds nothing here, and it finds what a careless writer would leave."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.extract import kills
from tests.extract.test_kill import ENV, ROOT


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("kills") / "f"
    kills.write(out, stream=False)
    return out


def test_a_lost_a_doubled_and_a_torn_shard_are_seen(whole, tmp_path):
    wanted = kills.truth()
    assert kills.faults(whole, wanted, complete=True) == []
    out = shutil.copytree(whole, tmp_path / "f")
    names = [path.name for path in sorted((out / "shards").iterdir())]
    data = (out / "shards" / names[3]).read_bytes()
    (out / "shards" / names[3]).unlink()
    assert "19 shards" in kills.faults(out, wanted, complete=True)
    assert kills.faults(out, wanted, complete=False) == []
    shutil.copy(out / "shards" / names[4], out / "shards" / names[3])
    assert f"{names[3]}: first has other rows" in kills.faults(out, wanted, complete=False)
    (out / "shards" / names[3]).write_bytes(data[:-3])
    assert any(names[3] in fault for fault in kills.faults(out, wanted, complete=False))


def _hunt(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: it forks, and no threads of the tests may be there.
    command = [sys.executable, *(["-c", code] if code else ["-m", "tests.extract.kills"]), *arguments]
    return subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_no_kill_loses_doubles_or_tears_a_row():
    done = _hunt("", "--count", "15", "--seed", "7")
    told = json.loads(done.stdout.splitlines()[0])
    assert (done.returncode, told["wrong"]) == (0, 0), done.stdout
    assert told["kills"] >= 15


@pytest.mark.slow
def test_a_careless_writer_is_found_out(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from tests.extract import kills; "
        "from torchhook._features.storage import Folder\n"
        "def create(self, name, chunks):\n"
        "    final = self.root / name\n"
        "    final.parent.mkdir(parents=True, exist_ok=True)\n"
        "    if final.exists(): return False\n"
        "    with open(final, 'wb', buffering=0) as file:\n"
        "        for chunk in chunks: os.writev(file.fileno(), [chunk])\n"
        "    return True\n"
        "Folder.create = create\n"
        "print(len(kills.hunt(60, 0, 1, Path(sys.argv[1])).wrong))"
    )
    done = _hunt(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
