"""Run the benchmarks that need no GPU, one after the other: tables as they come, JSON in ``results/``, then the README.

    python benchmarks/run.py [--only capture cam] [--peers PYTHON]

The programs that stand beside peers run with the Python of their environment (``peers.sh`` makes it), the others with
this one. A program that fails, or says that something is over its limit, does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from results import ROOT, environment
from write_readme import RESULTS
from write_readme import main as write

HERE = Path(__file__).parent
BESIDE_PEERS = ["capture", "growth", "cam", "features", "hotspots"]
ALONE = ["watch", "guard", "sweep", "extract", "stream"]
PEERS = ROOT / ".venv" / "peers" / "bin" / "python"


def run(name: str, python: str) -> int:
    """The exit status of one program; its figures go to ``results/``."""
    path = RESULTS / f"{name}.json"
    source = str(ROOT / "src")
    paths = os.pathsep.join([source, os.environ["PYTHONPATH"]]) if "PYTHONPATH" in os.environ else source
    print(f"\n== {name} ==", flush=True)
    command = [python, str(HERE / f"{name}.py"), "--json", str(path)]
    if name == "hotspots" and shutil.which("valgrind"):
        command.append("--instructions")
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths})
    if path.exists():
        add_environment(path)
    return done.returncode


def add_environment(path: Path) -> None:
    """Figures without their machine and commit say little."""
    found = json.loads(path.read_text())
    if "environment" not in found:
        path.write_text(json.dumps({"environment": environment(), "found": found}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = [name for name in [*BESIDE_PEERS, *ALONE] if (HERE / f"{name}.py").exists()]
    parser.add_argument("--only", nargs="+", choices=programs, metavar="NAME", help=", ".join(programs))
    parser.add_argument("--peers", default=str(PEERS), help="the Python that has the peers")
    options = parser.parse_args()
    peers = options.peers if Path(options.peers).exists() else sys.executable
    RESULTS.mkdir(exist_ok=True)
    chosen = options.only or programs
    failed = [name for name in chosen if run(name, peers if name in BESIDE_PEERS else sys.executable)]
    write()
    sys.exit(f"failed, or over a limit: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
