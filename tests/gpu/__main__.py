"""Run the CUDA tests without pytest: ``PYTHONPATH=src python -m tests.gpu [PART OF A NAME]`` from the checkout."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path


def main() -> int:
    failed = passed = 0
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for path in sorted(path for path in Path(__file__).parent.glob("test_*.py") if part in path.stem):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        for name, test in list(vars(module).items()):
            if not name.startswith("test_"):
                continue
            try:
                test()
                passed += 1
                print(f"ok    {path.stem}: {name}")
            except Exception:
                failed += 1
                print(f"FAIL  {path.stem}: {name}")
                traceback.print_exc()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
