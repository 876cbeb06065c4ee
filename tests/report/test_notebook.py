"""What a notebook shows, by running one."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

CELLS = {
    "setup": """
import torch, torchhook as th
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
other.load_state_dict(model.state_dict())
nn.init.zeros_(other[2].bias)
with th.capture(model, "0", "2:input") as recording:
    model(torch.ones(2, 3))
""",
    "recording": "recording",
    "layers": "th.layers(model, inputs=torch.ones(2, 3))",
    "diff": "th.diff(model, other, torch.ones(2, 3))",
}


class Cells(HTMLParser):
    """The text of every table cell; fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    found = {}
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        for output in cell.outputs:
            if output.output_type == "execute_result":
                parser = Cells()
                parser.feed(output.data["text/html"])
                assert parser.open == []
                found[name] = parser.texts
    return found


@pytest.mark.slow
def test_a_recording_shows_its_sites(shown: dict[str, list[str]]) -> None:
    assert {"0", "2:input", "(2, 4)", "float32"} <= set(shown["recording"])


@pytest.mark.slow
def test_layers_show_types_shapes_and_parameters(shown: dict[str, list[str]]) -> None:
    assert {"(model)", "Linear", "ReLU", "(2, 2)", "16", "26"} <= {text.strip() for text in shown["layers"]}


@pytest.mark.slow
def test_a_diff_shows_where_the_models_part(shown: dict[str, list[str]]) -> None:
    assert any("the first" in text for text in shown["diff"])
    assert {"0", "1", "2"} <= set(shown["diff"])
