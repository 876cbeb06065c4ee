"""The commands, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import torchhook as th
from tests.cli import nets
from tests.cli.conftest import Command
from tests.report.nets import Text
from torchhook import demo
from torchhook._features.api import open_features

SMALL = "tests.cli.nets:small"
SHAPE = "1x3x32x32"


def test_layers_lists_names_types_and_shapes(torchhook: Command) -> None:
    done = torchhook("layers", SMALL, "--shape", SHAPE)
    assert done.code == 0
    assert "Conv2d             (1, 8, 15, 15)         224" in done.out


def test_layers_speaks_json(torchhook: Command) -> None:
    found = json.loads(torchhook("layers", SMALL, "--json", "--depth", 1).out)
    assert [layer["name"] for layer in found] == ["", "0", "1", "2", "3", "4"]
    assert found[1]["parameters"] == 224


def test_run_records_and_saves(torchhook: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    done = torchhook("run", SMALL, "--shape", SHAPE, "-s", "0", "-s", "4:input", "-o", path)
    assert done.code == 0
    assert "4:input" in done.out
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(th.load(path)["0"], nets.small()[0](x))


def test_run_speaks_json(torchhook: Command) -> None:
    found = json.loads(torchhook("run", SMALL, "--shape", SHAPE, "-s", "1", "--stop", "--json").out)
    assert found["output"] is None
    assert [record["site"] for record in found["records"]] == ["1"]


def test_report_writes_a_page(torchhook: Command, tmp_path: Path, photos: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\nbird\nfish\nfrog\n")
    out = tmp_path / "page.html"
    done = torchhook(
        "report", SMALL, "--input", photos / "0.png", "--size", 32, "--target", 1, "--labels", names, "-o", out
    )
    assert (done.code, done.out.strip()) == (0, str(out))
    assert "dog (1)" in out.read_text("utf-8")
    assert json.loads(torchhook("report", SMALL, "--shape", SHAPE, "-o", out, "--json").out)["bytes"] > 10_000


def test_report_takes_token_ids(torchhook: Command, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = torchhook("report", "tests.report.nets:Text", "--tokens", "5, 9,2", "-o", out)
    assert (done.code, done.out.strip()) == (0, str(out))
    page = out.read_text("utf-8")
    assert '"tokens":[{"text":"5"' in page
    assert '"input":"(1, 3)"' in page


def test_diff_of_models_says_where_they_part_by_its_exit_code_too(torchhook: Command) -> None:
    assert torchhook("diff", SMALL, SMALL, "--shape", SHAPE).code == 0
    done = torchhook("diff", SMALL, "tests.cli.nets:other", "--shape", SHAPE, "--json")
    found = json.loads(done.out)
    assert (done.code, found["same"], found["first"]) == (1, False, "4")


def test_diff_of_recordings_needs_no_model(torchhook: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    torchhook("run", SMALL, "--shape", SHAPE, "-o", a)
    torchhook("run", "tests.cli.nets:other", "--shape", SHAPE, "-o", b)
    assert torchhook("diff", a, a).code == 0
    assert torchhook("diff", a, b).code == 1
    assert torchhook("diff", a, tmp_path / "absent.safetensors").code == 2
    assert torchhook("diff", a, SMALL).code == 2


def test_diff_of_recordings_looks_at_the_layers_that_were_asked_for(torchhook: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for name, path in ((SMALL, a), ("tests.cli.nets:other", b)):
        torchhook("run", name, "--shape", SHAPE, "-o", path, "-s", "*", "-s", "4:input")
    # They differ in the bias of the last layer alone.
    assert torchhook("diff", a, b, "-s", "0").code == 0
    assert torchhook("diff", a, b, "-s", "0", "-s", "4").code == 1
    assert torchhook("diff", a, b, "-s", "4:input").code == 0
    found = json.loads(torchhook("diff", a, b, "-s", "[01]", "--json").out)
    assert [row["site"] for row in found["rows"]] == ["0", "1"]
    assert "--sites 7 matches nothing" in torchhook("diff", a, b, "-s", "7").err
    done = torchhook("diff", a, b, "--shape", SHAPE, "--weights-b", a, "--device", "meta")
    assert done.code == 2
    assert "leave out --shape, --weights-b" in done.err


def test_random_weights_are_the_same_each_time_and_said(torchhook: Command) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    name = "torchvision:shufflenet_v2_x0_5"
    torch.manual_seed(123)
    before = torch.get_rng_state()
    done = torchhook("diff", name, name, "--shape", "1x3x32x32", "-s", "fc")
    assert done.code == 0
    assert f"{name} has random weights; add --weights or --pretrained." in done.err
    assert torch.equal(torch.get_rng_state(), before)
    assert torchhook("layers", name, "--depth", 1).err == ""
    assert torchhook("run", SMALL, "--shape", SHAPE, "-s", "0").err == ""


def test_a_method_that_is_not_known_is_refused_before_anything_runs(torchhook: Command, tmp_path: Path) -> None:
    done = torchhook("report", "no.such:model", "--shape", SHAPE, "--cam", "foo", "-o", tmp_path / "page.html")
    assert done.code == 2
    assert done.err.startswith("torchhook: --cam foo: use gradcam, gradcam++,")
    assert not (tmp_path / "page.html").exists()


def test_advice_names_options_of_the_command_line(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "features"
    line = ["extract", SMALL, "--data", rows, "-o", out, "--workers", 0, "--no-progress", "-s"]
    assert torchhook(*line, "1").code == 0
    done = torchhook(*line, "0")
    assert done.code == 2
    assert "add --no-resume to begin again" in done.err
    assert "resume=False" not in done.err
    shard = next((out / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    done = torchhook("features", "verify", out)
    assert "(--discard does)" in done.out
    assert "deleted 1 broken shard." in torchhook("features", "verify", out, "--discard").err


def test_extract_writes_features_and_resumes(torchhook: Command, tmp_path: Path, photos: Path) -> None:
    out = tmp_path / "features"
    line = ["extract", SMALL, "--data", photos, "-s", "1", "--pool", "mean", "-o", out, "--size", 32, "--workers", 0]
    done = torchhook(*line, "--no-progress")
    assert done.code == 0
    features = open_features(out)
    assert features["1"].shape == (5, 8)
    assert list(features.ids) == [f"{i}.png" for i in range(5)]
    shard = next((out / "shards").glob("*.safetensors"))
    before = shard.stat().st_mtime_ns
    assert torchhook(*line, "--no-progress").code == 0
    assert shard.stat().st_mtime_ns == before
    again = torchhook(*line[:6], "--pool", "max", *line[8:], "--no-progress")
    assert again.code == 2
    # What differs stands on a line of its own, as in Python.
    assert "\n  transform: the store has pool('mean'), this run pool('max')\n" in again.err


def test_extract_and_export_choose_sites(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "features"
    line = ("extract", SMALL, "--data", rows, "-o", out, "--no-progress")
    assert torchhook(*line, "--sites", "3", "--sites", "(model)").code == 0
    assert open_features(out).keys() == ["3", ""]
    assert torchhook(*line, "--layers", "3").code == 2
    torchhook("features", "export", out, "-o", tmp_path / "npy", "--sites", "(model)")
    assert [path.name for path in (tmp_path / "npy").iterdir()] == ["model.npy"]


def test_features_are_described_checked_and_exported(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "features"
    assert torchhook("extract", SMALL, "--data", rows, "-s", "3", "-o", out, "--json").code == 0
    found = json.loads(torchhook("features", "info", out, "--json").out)
    assert (found["rows"], found["sites"]["3"]["shape"]) == (6, [6, 8])
    assert "6 rows" in torchhook("features", "info", out).out
    assert torchhook("features", "verify", out).code == 0
    torchhook("features", "export", out, "-o", tmp_path / "npy")
    with torch.no_grad():
        truth = nets.small()[:4](load_file(rows)["x"])
    assert np.allclose(np.load(tmp_path / "npy" / "3.npy"), truth.numpy(), atol=1e-6)


def test_a_broken_shard_is_found_deleted_and_done_again(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "features"
    line = ("extract", SMALL, "--data", rows, "-s", "3", "-o", out, "--no-progress")
    torchhook(*line)
    shard = next((out / "shards").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = torchhook("features", "verify", out, "--json", "--discard")
    assert done.code == 1
    assert json.loads(done.out)["problems"][0]["kind"] == "altered"
    assert torchhook(*line).code == 0
    assert torchhook("features", "verify", out).code == 0


def test_layers_show_the_columns_that_are_asked_for(torchhook: Command) -> None:
    done = torchhook("layers", SMALL, "--columns", "type, parameters,trainable")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1].split() == ["layer", "type", "parameters", "trainable"]
    done = torchhook("layers", SMALL, "--columns", "multiply_adds,time,memory", "--shape", "1x3x32x32")
    assert done.out.splitlines()[1].split() == ["layer", "multiply-adds", "time", "memory"]
    assert "total: " in done.out
    shown = torchhook("layers", SMALL, "--columns", "all", "--shape", "1x3x32x32", "--json")
    assert json.loads(shown.out)[0]["multiply_adds"] > 0


def test_a_column_that_is_none_or_needs_a_run_is_told_before_the_model_is_loaded(torchhook: Command) -> None:
    done = torchhook("layers", "no.such.module:net", "--columns", "tim")
    assert done.code == 2
    assert done.err.startswith("torchhook: --columns: 'tim' is none of 'type'")
    assert "Closest: 'time'" in done.err
    done = torchhook("layers", "no.such.module:net", "--columns", "time")
    assert done.err == "torchhook: --columns: 'time' is known after a run: add --input, --text, --tokens or --shape.\n"


TEXT = "tests.report.nets:Text"


def test_every_command_that_calls_a_model_takes_token_ids(torchhook: Command, tmp_path: Path) -> None:
    done = torchhook("layers", TEXT, "--tokens", "5,9,2")
    assert (done.code, "(1, 3, 16)" in done.out) == (0, True)
    done = torchhook("run", TEXT, "--tokens", "5,9,2", "-s", "embed", "-o", tmp_path / "a.safetensors")
    assert done.code == 0
    model, ids = Text(), torch.tensor([[5, 9, 2]])
    assert torch.equal(th.load(tmp_path / "a.safetensors")["embed"], model.embed(ids))
    assert torchhook("diff", TEXT, TEXT, "--tokens", "5,9,2").code == 0
    assert torchhook("diff", TEXT, tmp_path / "a.safetensors", "--tokens", "5,9,2", "-s", "embed").code == 0
    assert torchhook("diff", TEXT, tmp_path / "a.safetensors", "--tokens", "5,9,3", "-s", "embed").code == 1
    both = tmp_path / "a.safetensors"
    assert "leave out --tokens" in torchhook("diff", both, both, "--tokens", "5").err
    for command in (("layers", TEXT), ("run", TEXT), ("diff", TEXT, TEXT), ("report", TEXT)):
        done = torchhook(*command, "--tokens", "5,9", "--shape", "1x2")
        assert (done.code, "give one input" in done.err) == (2, True)


def test_a_dry_run_writes_nothing(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    done = torchhook("extract", SMALL, "--data", rows, "-s", "3", "-o", tmp_path / "features", "--dry-run")
    assert done.code == 0
    assert "6 rows" in done.out
    assert not (tmp_path / "features").exists() or not any((tmp_path / "features").iterdir())


def test_demo_is_the_demo(torchhook: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "main", lambda: print("the demo"))
    assert torchhook("demo") == (0, "the demo\n", "")


@pytest.mark.parametrize(
    "line",
    [
        ("layers", "nonsense"),
        ("layers", SMALL, "--depth", "-1"),
        ("run", SMALL, "--shape", SHAPE, "-s", "fc"),
        ("run", SMALL),
        ("report", SMALL, "--shape", SHAPE, "--target", "9"),
        ("report", SMALL, "--shape", SHAPE, "--out", "x.pdf"),
        ("extract", SMALL, "--data", "absent", "-s", "0"),
        ("extract", SMALL, "--data", "absent", "-s", "0", "--pool", "median"),
        ("features", "info", "absent"),
        ("features", "verify", "absent"),
    ],
)
def test_trouble_is_one_line_without_a_traceback_and_exit_code_2(torchhook: Command, line: tuple[str, ...]) -> None:
    done = torchhook(*line)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.strip().splitlines()) == 1
    assert done.err.startswith("torchhook: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("site", ["0:grad", "*:grad", "0:grad_input", "0.weight:grad", "0/conv2d:grad"])
@pytest.mark.parametrize("command", [("run",), ("diff", SMALL)])
def test_a_gradient_is_refused_in_one_sentence_where_no_backward_pass_runs(
    torchhook: Command, command: tuple[str, ...], site: str
) -> None:
    done = torchhook(*command, SMALL, "--shape", SHAPE, "-s", "1", "-s", site)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.strip().splitlines()
    assert f"--sites {site}: torchhook {command[0]} computes no gradients" in line
    assert line.count(". ") == 0
    assert f"th.capture(model, {site!r})" in line


def test_gradients_of_recordings_are_compared_by_the_command_too(torchhook: Command, tmp_path: Path) -> None:
    model = nets.small()
    with th.capture(model, "0:grad") as rec:
        model(torch.rand(1, 3, 32, 32)).sum().backward()
    a, b = rec.save(tmp_path / "a.safetensors"), rec.save(tmp_path / "b.safetensors")
    assert torchhook("diff", a, b, "-s", "0:grad").code == 0


def test_a_traceback_can_be_asked_for(torchhook: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHHOOK_TRACEBACK", "1")
    assert "Traceback" in torchhook("run", "tests.cli.nets:Raises", "--shape", "1x2").err


def test_a_wrong_option_is_exit_code_2(torchhook: Command) -> None:
    assert torchhook("layers", SMALL, "--nonsense").code == 2


@pytest.mark.parametrize("command", ["layers", "run", "report", "diff", "extract"])
def test_help_has_examples(torchhook: Command, command: str) -> None:
    done = torchhook(command, "--help")
    assert done.code == 0
    assert f"torchhook {command} " in done.out


def test_help_lists_every_command_and_version_is_one_line(torchhook: Command) -> None:
    shown = torchhook("--help").out
    assert all(name in shown for name in ("layers", "run", "report", "extract", "features", "diff", "demo"))
    assert "--install-completion" in shown
    assert torchhook("--version").out.strip() == th.__version__


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchhook", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        timeout=300,
        check=False,
    )


def test_a_terminal_gets_colours_and_the_same_cells(torchhook: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = torchhook("layers", SMALL, "--shape", SHAPE).out
    assert "\x1b[" in shown
    assert "(1, 8, 15, 15)" in shown
    assert "AdaptiveAvgPool2d" in shown


@pytest.mark.slow
def test_the_line_of_the_manual_works_on_a_real_model(torchhook: Command, tmp_path: Path, photos: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    line = ("--data", photos, "--sites", "blocks.11", "--out", tmp_path / "features", "--pool", "mean", "--workers", 0)
    refused = torchhook("extract", "timm:vit_tiny_patch16_224", *line)
    assert refused.code == 2
    assert "--pretrained to fetch its own, --weights FILE for others, or --random" in " ".join(refused.err.split())
    assert not (tmp_path / "features").exists()
    assert torchhook("extract", "timm:vit_tiny_patch16_224", "--random", *line).code == 0
    assert open_features(tmp_path / "features")["blocks.11"].shape == (5, 192)


@pytest.mark.slow
def test_a_pretrained_network_finds_the_cat(torchhook: Command, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    pillow.fromarray(data.chelsea()).save(tmp_path / "cat.png")
    out = tmp_path / "cat.html"
    line = ("--input", tmp_path / "cat.png", "--mean", 0.5, "--std", 0.5, "-o", out)
    assert torchhook("report", "torchhook.demo:efficientnet_lite0", *line).code == 0
    page = out.read_text("utf-8")
    assert any(f"class {cat}, the most likely" in page for cat in (281, 282, 285))  # tabby, tiger, Egyptian


@pytest.mark.slow
def test_a_process_of_its_own_prints_only_json_to_stdout() -> None:
    done = started("run", SMALL, "--shape", SHAPE, "-s", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"][0]["site"] == "0"
    assert done.stderr == ""


@pytest.mark.slow
def test_the_shell_completes_commands() -> None:
    asked = {"_TORCHHOOK_COMPLETE": "complete_bash", "COMP_WORDS": "torchhook ex", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'torchhook'; from torchhook._cli.api import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **asked},
        timeout=300,
        check=False,
    )
    assert "extract" in done.stdout
