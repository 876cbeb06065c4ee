"""Inputs on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.cli import nets
from tests.cli.conftest import Command
from torchhook._cli import inputs
from torchhook._cli.errors import Trouble
from torchhook._cli.inputs import Options


def load(**options: object) -> inputs.Given:
    return inputs.load(Options(**options), nets.ready, "tests.cli.nets:ready")  # type: ignore[arg-type]


def test_a_shape_is_random_numbers_that_repeat() -> None:
    assert torch.equal(load(shape="2x3x4").x, load(shape="2,3,4").x)
    assert load(shape="2x3x4").x.shape == (2, 3, 4)
    assert load(shape="2x3x4").x.std() > 0.5


def test_an_image_is_resized_cropped_and_normalised(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pillow.new("RGB", (60, 40), (255, 255, 255)).save(tmp_path / "white.png")
    x = load(file=tmp_path / "white.png", size=32, mean="0.5", std="0.5").x
    assert x.shape == (1, 3, 32, 32)
    assert torch.allclose(x, torch.ones_like(x))
    assert load(file=tmp_path / "white.png").x.shape == (1, 3, 224, 224)


def test_tensors_are_the_argument_or_arguments_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "two.safetensors")
    assert torch.equal(load(file=tmp_path / "one.safetensors").x, torch.ones(2))
    assert load(file=tmp_path / "two.safetensors").x.keys() == {"a", "b"}


def test_text_is_cut_into_tokens_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hooks", "see"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    transformers.BertConfig(vocab_size=7).save_pretrained(tmp_path)
    given = inputs.load(Options(text="hooks see"), nets.ready, f"transformers:{tmp_path}")
    assert given.tokens == ["[CLS]", "hooks", "see", "[SEP]"]
    assert given.x["input_ids"].tolist() == [[2, 5, 6, 3]]


def test_a_tokenizer_that_makes_no_token_is_said(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    # Words that are not in the vocabulary, without a token for the unknown: nothing is left.
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    empty.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("[^a]"), "")
    transformers.PreTrainedTokenizerFast(tokenizer_object=empty).save_pretrained(tmp_path)
    transformers.BertConfig(vocab_size=7).save_pretrained(tmp_path)
    with pytest.raises(Trouble, match=r"makes no token of 'hooks'.*--tokens 1,2,3"):
        inputs.load(Options(text="hooks"), nets.ready, f"transformers:{tmp_path}")


def test_token_ids_are_the_argument_and_checked_against_the_models_table() -> None:
    class Embeds(nn.Embedding):
        def get_input_embeddings(self) -> nn.Module:
            return self

    given = inputs.load(Options(tokens="5, 9,2"), Embeds(10, 2), "any")
    assert given.x.tolist() == [[5, 9, 2]]
    with pytest.raises(Trouble, match="--tokens 5,10: the model has 10 tokens, 0 to 9, and 10 is none"):
        inputs.load(Options(tokens="5,10"), Embeds(10, 2), "any")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one input"),
        ({"shape": "1x2", "text": "a"}, "give one input"),
        ({"shape": "1x2", "tokens": "1"}, "give one input"),
        ({"tokens": "1,two"}, "--tokens 1,two: give whole numbers with commas between"),
        ({"tokens": "-1"}, "--tokens -1: give whole numbers"),
        ({"shape": "1xx2"}, "--shape 1xx2: give sizes"),
        ({"text": "hello"}, "text needs a tokenizer"),
        ({"file": Path("absent.png")}, "no input file absent.png"),
    ],
)
def test_a_wrong_input_is_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(Trouble, match=message):
        load(**options)


@pytest.mark.parametrize("name", ["broken.png", "broken.safetensors", "odd.xyz"])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(Trouble, match=name):
        load(file=tmp_path / name)


def test_means_must_be_numbers(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="--mean a,b"):
        inputs.preparation(Options(mean="a,b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": "0"}, "--std 0: give positive numbers"),
        ({"std": "0.2,0.2,-1"}, "--std 0.2,0.2,-1: give positive numbers"),
        ({"mean": "nan"}, "--mean nan: give one number"),
        ({"std": "inf"}, "--std inf: give one number"),
        ({"mean": "0.5,0.5"}, "--mean 0.5,0.5: give one number, or three"),
        ({"mean": "0.5"}, "--mean 0.5: give --std too"),
        ({"std": "0.5"}, "--std 0.5: give --mean too"),
    ],
)
def test_images_cannot_be_normalised_by_anything(options: dict[str, str], message: str) -> None:
    with pytest.raises(Trouble, match=message):
        inputs.preparation(Options(**options))  # type: ignore[arg-type]


def test_a_broken_image_is_named_as_it_was_given(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image", reason="pillow is not installed")
    (tmp_path / "bad.jpg").write_bytes(b"nonsense")
    with pytest.raises(Trouble) as raised:
        load(file=tmp_path / "bad.jpg")
    assert str(raised.value) == f"{tmp_path}/bad.jpg cannot be read as an image: cannot identify image file 'bad.jpg'"


def test_images_for_a_model_of_torchvision_are_prepared_by_torchvision(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    vision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    pixels = torch.randint(0, 255, (300, 400, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = pillow.fromarray(pixels.numpy())
    picture.save(tmp_path / "a.png")
    for name in ("resnet18", "inception_v3"):
        own = vision.models.get_model_weights(name).DEFAULT.transforms()
        given = inputs.load(Options(file=tmp_path / "a.png"), nets.ready, f"torchvision:{name}")
        assert torch.equal(given.x[0], own(picture))
    changed = inputs.preparation_for("torchvision:resnet18", Options(size=64))
    assert (changed["size"], changed["crop"], changed["interpolation"]) == (64, 1.0, "bilinear")
    assert inputs.preparation_for("timm:resnet18", Options()) == {}


@pytest.mark.parametrize("command", ["layers", "run", "report", "diff"])
def test_how_an_image_was_prepared_is_said_and_can_be_by_every_command(
    torchhook: Command, tmp_path: Path, photos: Path, command: str
) -> None:
    small = "tests.cli.nets:small"
    line = [command, small, *([small] if command == "diff" else []), "--input", photos / "0.png"]
    line += ["-o", tmp_path / "page.html"] if command == "report" else []
    imagenet = "mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225"
    half = "mean 0.5, 0.5, 0.5, std 0.25, 0.25, 0.25"
    for options, said in (
        (
            (),
            f"bilinear to 256, cropped to 224 × 224, {imagenet} "
            "(as for ImageNet: the model does not say; --size, --mean and --std do)",
        ),
        (
            ("--size", 32),
            f"bilinear to 32, cropped to 32 × 32, {imagenet} "
            "(normalized as for ImageNet: the model does not say; --mean and --std do)",
        ),
        (
            ("--mean", 0.5, "--std", 0.25),
            f"bilinear to 256, cropped to 224 × 224, {half} "
            "(resized as for ImageNet: the model does not say; --size does)",
        ),
        (("--size", 32, "--mean", 0.5, "--std", 0.25), f"bilinear to 32, cropped to 32 × 32, {half}"),
    ):
        done = torchhook(*line, *options)
        assert (done.code, done.err) == (0, f"0.png, prepared so: {said}\n")
    refused = torchhook(*line, "--mean", 0.5)
    assert (refused.code, refused.out) == (2, "")
    assert "--mean 0.5: give --std too" in refused.err


def test_tensors_are_given_as_they_are_without_a_word(torchhook: Command, rows: Path) -> None:
    assert torchhook("run", "tests.cli.nets:small", "--input", rows).err == ""
