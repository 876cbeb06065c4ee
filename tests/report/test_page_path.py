"""The path of a page, and the page in the frame of a notebook, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.report.conftest import Tab
from tests.report.nets import Photo
from torchhook._report import page_path
from torchhook._report.api import PagePath, report

X = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> PagePath:
    out = tmp_path_factory.mktemp("report") / 'photo <1> & "2".html'
    return report(Photo().eval(), X, out, title='A "photo" <&>')


def framed(tab: Tab, folder: Path, shown: str) -> Any:
    notebook = folder / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset='utf-8'><h1>notebook</h1>{shown}", "utf-8")
    tab.page.goto(notebook.as_uri())
    frame = tab.page.frames[1]
    frame.wait_for_selector("html[data-ready]")
    return frame


def test_the_page_lives_in_the_frame_of_a_notebook(tab: Tab, photo: PagePath, tmp_path: Path) -> None:
    frame = framed(tab, tmp_path, photo._repr_html_() or "")
    frame.click("[title='stem.0'] b")
    assert frame.text_content("#detail .title") == "stem.0"
    frame.fill("#search", "body relu")
    assert frame.text_content("#status") == "1 layer found"
    assert tab.page.text_content("h1") == "notebook"  # and has not gone anywhere
    assert tab.said == []
    assert tab.foreign == []


def test_a_page_that_is_too_large_for_a_notebook_is_a_link(
    photo: PagePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_path, "_LARGEST", 10)
    shown = photo._repr_html_() or ""
    assert "iframe" not in shown
    assert 'href="' in shown
    assert "&lt;1&gt; &amp; &quot;2&quot;.html" in shown


class Unrun(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model ran first")


@pytest.mark.parametrize("name", ["x.pdf", "x.PNG", "x.html.zip", "x.json", "x.safetensors", "x.md"])
def test_a_page_under_the_name_of_another_format_is_refused_before_the_model_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: the page is HTML.*'x(\.html)?\.html'.*prints it"):
        report(Unrun(), X, tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"is a folder: .*report\.html"):
        report(Unrun(), X, tmp_path)


@pytest.mark.parametrize("name", ["x.htm", "x.HTML", "run.1", "page"])
def test_any_other_name_is_the_users_own(name: str) -> None:
    assert page_path.page_at(name) == Path(name)
