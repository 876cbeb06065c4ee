"""What goes wrong, as the command line tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Command
from torchhook._cli.errors import spoken, told
from torchhook._features.api import open_features

SMALL = "tests.cli.nets:small"
SHAPE = "1x3x32x32"


def test_errors_keep_their_line_breaks(torchhook: Command) -> None:
    done = torchhook("run", "tests.cli.nets:Raises", "--shape", "1x2")
    assert (done.code, done.err) == (2, "torchhook: RuntimeError: two\nlines\n")


def test_a_very_long_error_ends() -> None:
    lines = told(ValueError("\n".join(["x" * 1000] * 100))).splitlines()
    assert len(lines) == 41
    assert max(map(len, lines)) == 600


def test_what_was_noted_with_an_error_is_told_too() -> None:
    error = ValueError("first")
    if not hasattr(error, "add_note"):
        pytest.skip("Python 3.10 has no notes")
    error.add_note("torchhook: raised by rows 0 to 3.")
    assert told(error) == "first\nraised by rows 0 to 3."


def test_a_store_of_other_weights_is_refused_with_the_names_of_the_tensors(
    torchhook: Command, tmp_path: Path, rows: Path
) -> None:
    line = ("--data", rows, "-s", "3", "-o", tmp_path / "f", "--no-progress")
    assert torchhook("extract", SMALL, *line).code == 0
    done = torchhook("extract", "tests.cli.nets:other", *line)
    assert "\n  model: other numbers in 1 of 4 tensors (4.bias)\n" in done.err
    assert "\nExtract to another path, or add --no-resume to begin again there." in done.err
    done = torchhook("extract", "tests.cli.nets:other", *line, "--dry-run")
    assert (done.code, "other numbers in 1 of 4 tensors" in done.err) == (2, True)
    assert torchhook("extract", "tests.cli.nets:other", *line, "--dry-run", "--no-resume").code == 0


def test_an_incomplete_store_is_not_exported_and_the_advice_is_a_command(
    torchhook: Command, tmp_path: Path, rows: Path
) -> None:
    line = ("extract", SMALL, "--data", rows, "-s", "3", "-o", tmp_path / "f", "--no-progress")
    assert torchhook(*line, "--batch-size", 2, "--rows-per-shard", 2).code == 0
    (tmp_path / "f" / "shards" / "s000000001.safetensors").unlink()
    done = torchhook("features", "export", tmp_path / "f", "-o", tmp_path / "npy")
    assert done.code == 2
    assert "lacks 1 of 3 shards" in done.err
    assert "The same extract command again does only those" in done.err
    assert "incomplete=True" not in done.err
    assert torchhook("features", "info", tmp_path / "f").code == 0


def test_random_weights_are_only_spoken_of_when_there_is_such_a_model(torchhook: Command, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    for line in (
        ("run", "timm:resnet81", "--shape", SHAPE),
        ("extract", "timm:resnet81", "--data", tmp_path, "-s", "0"),
    ):
        done = torchhook(*line, *(["--random"] if line[0] == "extract" else []))
        assert "timm has no model 'resnet81'" in done.err
        assert "random" not in done.err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothere", "--data nothere: there is no such folder or file."),
        ("a.csv", "--data a.csv: give a folder of images"),
    ],
)
def test_data_that_is_not_there_is_told_before_the_model_is_loaded(
    torchhook: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").touch()
    done = torchhook("extract", "no.such:model", "--data", name, "-s", "0")
    assert done.code == 2
    assert done.err.startswith(f"torchhook: {text}")


def test_a_recording_is_not_saved_as_another_format_and_this_is_told_before_the_run(
    torchhook: Command, tmp_path: Path
) -> None:
    done = torchhook("run", "no.such:model", "--shape", SHAPE, "-o", tmp_path / "run.pt")
    assert done.code == 2
    assert "Save it as 'run.safetensors'" in done.err


def test_a_broken_image_is_told_with_its_row_and_the_option(torchhook: Command, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for i in range(3):
        image.new("RGB", (8, 8)).save(tmp_path / "photos" / f"{i}.png")
    (tmp_path / "photos" / "1.png").write_bytes(b"nonsense")
    line = ("extract", SMALL, "--data", tmp_path / "photos", "-s", "0", "-o", tmp_path / "f", "--no-progress")
    for workers in (0, 1):
        done = torchhook(*line, "--workers", workers)
        assert done.code == 2
        assert "photos/1.png, row 1 of the data, cannot be read as an image: cannot identify image file" in done.err
        assert "add --skip-errors to leave out rows that cannot be loaded." in done.err
        assert "Traceback" not in done.err


def test_what_images_were_prepared_with_is_printed_and_stored_and_so_are_their_classes(
    torchhook: Command, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat/0.png", "dog/1.png", "cat/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (9, 8)).save(tmp_path / "photos" / name)
    line = ("extract", SMALL, "--data", tmp_path / "photos", "-s", "0", "-o", tmp_path / "f", "--no-progress")
    done = torchhook(*line)
    assert "3 images, prepared so: bilinear to 256, cropped to 224 × 224, mean 0.485, 0.456, 0.406, std" in done.err
    assert "(as for ImageNet: the model does not say; --size, --mean and --std do)" in done.err
    assert "as for ImageNet" not in torchhook(*line, "--no-resume", "--size", 8, "--mean", 0.5, "--std", 0.5).err
    shown = torchhook("features", "info", tmp_path / "f").out
    assert "images: bilinear to 8, cropped to 8 × 8, mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5" in shown
    assert "classes: cat, dog" in shown
    found = json.loads(torchhook("features", "info", tmp_path / "f", "--json").out)
    assert found["classes"] == ["cat", "dog"]
    assert found["preparation"].startswith("bilinear to 8")
    features = open_features(tmp_path / "f")
    assert [features.classes[label] for label in features.labels[:]] == ["cat", "cat", "dog"]


def test_images_for_a_model_of_timm_are_prepared_by_timm_to_the_pixel(torchhook: Command, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    pixels = torch.randint(0, 255, (300, 400, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image.fromarray(pixels.numpy()).save(tmp_path / "photos" / "0.png")
    # Cut at 0.95: timm resizes to floor(224 / 0.95) = 235, which rounding would make 236.
    name = "timm:resnet18.a1_in1k"
    model = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    config = timm.data.resolve_model_data_config(model)
    own = timm.data.create_transform(**config, is_training=False)
    done = torchhook(
        "extract",
        name,
        "--random",
        "--data",
        tmp_path / "photos",
        "-s",
        "conv1:input",
        "-o",
        tmp_path / "f",
        "--no-progress",
    )
    assert done.code == 0
    assert "Resize(size=235" in done.err
    stored = open_features(tmp_path / "f")["conv1:input"][0]
    assert torch.equal(stored, own(image.open(tmp_path / "photos" / "0.png").convert("RGB")))


def test_advice_is_spoken_with_options() -> None:
    assert spoken("rows_per_shard=0: give a positive number.") == "--rows-per-shard 0: give a positive number."


def test_tensors_of_rows_need_no_word_about_images(torchhook: Command, tmp_path: Path) -> None:
    save_file({"x": torch.rand(4, 3, 8, 8)}, tmp_path / "rows.safetensors")
    done = torchhook(
        "extract", SMALL, "--data", tmp_path / "rows.safetensors", "-s", "0", "-o", tmp_path / "f", "--no-progress"
    )
    assert "images" not in done.err


@pytest.mark.filterwarnings("default")
def test_a_wrong_attention_site_is_answered_with_the_right_ones(torchhook: Command, tmp_path: Path) -> None:
    save_file({"x": torch.rand(2, 4, 8)}, tmp_path / "x.safetensors")
    for wrong in ("attn.attn_drop", "attn/softmax"):
        done = torchhook("run", "tests.cli.nets:Attends", "--input", tmp_path / "x.safetensors", "-s", wrong)
        assert done.code == 0
        assert done.err.startswith(f"torchhook: 1 selected site never ran:\n  '{wrong}': ")
        assert "'attn/scaled_dot_product_attention' is what it gives" in done.err
        assert "th.attention(model, inputs, sites='attn') its maps" in done.err
        refused = torchhook(
            "extract", "tests.cli.nets:Attends", "--data", tmp_path / "x.safetensors", "-s", wrong, "-o", tmp_path / "f"
        )
        assert refused.code == 2
        assert "'attn/scaled_dot_product_attention' is what it gives" in refused.err
    right = "attn/scaled_dot_product_attention"
    assert torchhook("run", "tests.cli.nets:Attends", "--input", tmp_path / "x.safetensors", "-s", right).err == ""
