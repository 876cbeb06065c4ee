"""The main job runs on real weights, photographs and sentences, and leaves what it says it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchhook import demo


@pytest.mark.parametrize(("name", "label"), [("chelsea", 285), ("coffee", 967)])
def test_the_pretrained_network_knows_the_photographs(name: str, label: int) -> None:
    with torch.no_grad():
        assert demo.efficientnet_lite0()(demo.photograph(name)).argmax() == label


@pytest.mark.slow
def test_the_demo_prints_a_summary_and_writes_a_report_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main(tmp_path)
    printed = capsys.readouterr().out
    assert "chelsea: class 285" in printed
    assert "coffee: class 967" in printed
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"report.html", "feature-maps.png", "cam-chelsea.png", "cam-coffee.png", "attention.png"}
    assert (tmp_path / "report.html").stat().st_size < 10_000_000
