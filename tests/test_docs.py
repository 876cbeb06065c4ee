"""Every Python example in the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # of torch.export.unflatten about itself
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page.name} shows no example"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
