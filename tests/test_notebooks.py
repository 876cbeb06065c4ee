"""The notebooks run from the first cell to the last, offline, and are stored without what they show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import torchhook
from tests.documentation import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# What `tests/conftest.py` does for the tests, done for a kernel: torchvision beside a CPU build of torch.
STARTUP = "import tests.conftest\n"


def _read(path: Path) -> object:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def test_there_are_the_four_that_the_documentation_lists() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert len(NOTEBOOKS) == 4
    assert all(f"(../examples/{path.name})" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = [cell for cell in _read(path).cells if cell.cell_type == "code"]  # type: ignore[attr-defined]
    assert cells
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_the_first_cell_to_the_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-tests.py").write_text(STARTUP)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    found = [str(Path(torchhook.__file__).parent.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
    notebook = _read(path)
    nbclient.NotebookClient(notebook, timeout=60, startup_timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]  # type: ignore[attr-defined]
    assert shown
    # What other libraries say of themselves is theirs, such as tqdm's wish for ipywidgets.
    said = [output.text for output in shown if output.output_type == "stream" and output.name == "stderr"]
    outside = str(ROOT / ".venv")  # whose path may have any name in it
    assert not [text for text in said if "torchhook" in text.replace(outside, "")]
