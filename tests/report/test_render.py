"""The page as text: whole, safe, and without a way out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.report.nets import Photo
from torchhook import errors
from torchhook._report.api import report
from torchhook._report.collect import collect
from torchhook._report.render import render

X = torch.rand(1, 3, 12, 12)


def parts(html: str) -> tuple[dict, list[dict]]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    details = re.search(r'<script type="application/json" id="details">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert details is not None
    return json.loads(data[1]), [json.loads(line) for line in details[1].split("\n")]


def test_the_page_names_no_other_place(tmp_path: Path) -> None:
    html = report(Photo().eval(), X, tmp_path / "deep" / "page.html").read_text("utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "default-src 'none'" in html


def test_the_data_of_each_layer_stands_on_its_own_line() -> None:
    page = collect(Photo().eval(), X, cam=None)
    data, details = parts(render(page))
    assert len(data["layers"]) == len(details) == len(page.layers)
    assert [line["path"] for line in details] == [layer.path for layer in page.layers]


def test_names_that_look_like_markup_stay_names() -> None:
    model = nn.Sequential()
    model.add_module("</script><script>alert(1)</script>", nn.Identity())
    html = render(collect(model, torch.ones(1, 2), title="<b>bold</b>"))
    assert "<script>alert(1)" not in html
    assert "<b>bold</b>" not in html
    data, _ = parts(html)
    assert data["layers"][1]["path"] == "</script><script>alert(1)</script>"
    assert data["title"] == "<b>bold</b>"


def test_numbers_that_json_does_not_know_become_null() -> None:
    page = collect(nn.Linear(2, 2), torch.ones(1, 2))
    page.layers[0].seconds = float("nan")
    data, _ = parts(render(page))
    assert data["layers"][0]["seconds"] is None


def test_a_missing_template_engine_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(errors.importlib, "import_module", absent)
    with pytest.raises(errors.MissingExtraError, match=r"pip install jinja2 matplotlib pillow \(torchhook"):
        report(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "page.html")
