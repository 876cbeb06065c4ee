"""The command, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from tests.cli import nets
from torchhook._cli.api import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def torchhook(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        code = ended.value.code
        return Done(0 if code is None else int(code), out, err)

    return run


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = nets.small()
    torch.nn.init.constant_(model[4].bias, 7.0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "weights.pth")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    save_file(
        {"x": torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))}, tmp_path / "rows.safetensors"
    )
    return tmp_path / "rows.safetensors"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(5):
        pixels = torch.randint(0, 255, (40, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        pillow.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    return folder
