"""Names on the command line, and the models they mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import language_models
from tests.cli import nets
from torchhook._cli import models
from torchhook._cli.errors import Trouble

X = torch.rand(1, 3, 32, 32)


def test_a_function_of_a_module_is_called_and_a_model_is_taken_as_it_is() -> None:
    assert torch.equal(models.load("tests.cli.nets:small")(X), nets.small()(X))
    assert models.load("tests.cli.nets:ready") is nets.ready


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_alone.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\nnet = Net(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    assert models.load("mine_alone:net").out_features == 3


def test_torchvision_and_timm_models_are_built_without_weights() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    pytest.importorskip("timm", reason="timm is not installed")
    assert type(models.load("torchvision:resnet18")).__name__ == "ResNet"
    assert type(models.load("timm:vit_tiny_patch16_224")).__name__ == "VisionTransformer"


@pytest.mark.parametrize("name", ["fcn_resnet50", "ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn"])
def test_nothing_is_fetched_for_a_torchvision_model_with_a_backbone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")

    def fetched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"weights are fetched: {args}")

    from torchvision.models import _api

    monkeypatch.setattr(_api, "load_state_dict_from_url", fetched)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetched)
    assert models.is_random(f"torchvision:{name}", None, False)
    assert hasattr(models.load(f"torchvision:{name}"), "backbone")
    with pytest.raises(AssertionError, match="weights are fetched"):
        models.load(f"torchvision:{name}", pretrained=True)


@pytest.mark.parametrize("files", ["config", "folder", "weights"])
def test_transformers_models_come_from_a_config_or_a_folder(tmp_path: Path, files: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.architectures = ["BertForSequenceClassification"]
    original = transformers.BertForSequenceClassification(config)
    if files == "weights":
        original.save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
    name = tmp_path / "config.json" if files == "config" else tmp_path
    model = models.load(f"transformers:{name}")
    assert type(model).__name__ == "BertForSequenceClassification"
    if files == "weights":
        assert torch.equal(model.classifier.weight, original.classifier.weight)


def test_an_exported_program_has_its_modules_again(tmp_path: Path) -> None:
    path = tmp_path / "small.pt2"
    torch.export.save(torch.export.export(nets.small().eval(), (X,), strict=False), path)
    with pytest.raises(Trouble, match="--allow-pickle"):
        models.load(str(path))
    model = models.load(str(path), allow_pickle=True)
    assert torch.allclose(model(X), nets.small()(X))
    assert "0" in dict(model.named_modules())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "names no model: use torchvision:NAME"),
        ("no.such.package:net", "no Python module 'no.such.package'"),
        ("tests.cli.nets:smal", "Closest: 'small'"),
        ("tests.cli.nets:number", "is a int"),
        ("tests.cli.nets:text", "returned a str, not a torch.nn.Module"),
        ("torchvision:resnet81", "torchvision has no model 'resnet81'. Closest: 'resnet18'"),
        ("timm:vit_tinny_patch16_224", "timm has no model"),
        ("transformers:no/such/folder", "add --pretrained"),
        ("nothing.pt2", "no file nothing.pt2"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_a_way_out(name: str, message: str) -> None:
    with pytest.raises(Trouble, match=message.replace(".", r"\.")):
        models.load(name)


def test_a_library_that_cannot_be_imported_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("torchhook.errors.importlib.import_module", broken)
    with pytest.raises(Trouble, match="built for another torch"):
        models.load("torchvision:resnet18")


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], None])
def test_a_torchvision_that_is_broken_is_explained_for_transformers_too(
    tmp_path: Path, architectures: list[str] | None
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50, "n_positions": 8, **language_models.ENDS}
    transformers.GPT2Config(**small, architectures=architectures).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    # In a process of its own: transformers is imported here already, with a torchvision that is whole.
    path = os.pathsep.join([str(tmp_path), *sys.path])
    line = [sys.executable, "-m", "torchhook", "run", f"transformers:{tmp_path / 'gpt2'}", "--tokens", "1,2,3"]
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        pytest.skip("this transformers imports no torchvision for a language model")
    assert done.returncode == 2
    assert "cannot be imported (operator torchvision::nms is missing)" in done.stderr
    assert "built for another torch" in done.stderr
    assert "requirements defined correctly" not in done.stderr


def test_what_a_model_needs_and_is_not_installed_is_named() -> None:
    late = ModuleNotFoundError("Could not import module 'X'.")
    late.__cause__ = ImportError("No module named 'timmm'")
    needs = "transformers cannot import what this model needs: No module named 'timmm'"
    with pytest.raises(Trouble, match=needs), models.imports_of("transformers"):
        raise late


def test_a_device_that_is_not_there_is_explained() -> None:
    with pytest.raises(Trouble, match="--device nonsense cannot be used"):
        models.load("tests.cli.nets:small", device="nonsense")


# -- weights ------------------------------------------------------------------------------------------


def test_weights_are_read_from_safetensors(weights: Path) -> None:
    bias = models.load("tests.cli.nets:small", weights=weights)[4].bias
    assert bias.tolist() == [7.0] * 5


def test_pickled_weights_need_a_flag_and_lose_their_prefix(weights: Path) -> None:
    path = weights.with_suffix(".pth")
    with pytest.raises(Trouble, match="--allow-pickle"):
        models.load("tests.cli.nets:small", weights=path)
    bias = models.load("tests.cli.nets:small", weights=path, allow_pickle=True)[4].bias
    assert bias.tolist() == [7.0] * 5


class Evil:
    """Says that it was unpickled."""

    def __reduce__(self) -> Any:
        return os.putenv, ("TORCHHOOK_UNPICKLED", "1")


def test_pickles_are_opened_safely_first_and_never_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []
    original = torch.load

    def watched(*args: Any, weights_only: bool, **kwargs: Any) -> Any:
        tried.append(weights_only)
        return original(*args, weights_only=weights_only, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    path = tmp_path / "evil.pt"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(Trouble, match="--allow-pickle"):
        models.load("tests.cli.nets:small", weights=path)
    assert tried == []
    with pytest.raises(Trouble, match="no state dict"):
        models.load("tests.cli.nets:small", weights=path, allow_pickle=True)
    assert tried == [True, False]


def test_weights_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "part.pt"
    torch.save({"0.weight": nets.small()[0].weight, "head.weight": torch.ones(1)}, path)
    with pytest.raises(Trouble, match=r"3 missing \(0.bias, 4.weight, 4.bias\) and 1 unexpected \(head.weight\)"):
        models.load("tests.cli.nets:small", weights=path, allow_pickle=True)
    torch.save({**nets.small().state_dict(), "4.bias": torch.ones(9)}, path)
    with pytest.raises(Trouble, match=r"does not fit the model: .*size mismatch"):
        models.load("tests.cli.nets:small", weights=path, allow_pickle=True)


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pth"])
def test_a_broken_weights_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(Trouble):
        models.load("tests.cli.nets:small", weights=tmp_path / name, allow_pickle=True)
    with pytest.raises(Trouble, match="no weights file"):
        models.load("tests.cli.nets:small", weights=tmp_path / "absent.pth")


def test_class_names_come_from_lines_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("cat\ndog\n")
    (tmp_path / "a.json").write_text(json.dumps(["cat", "dog"]))
    assert models.read_classes(tmp_path / "a.txt") == models.read_classes(tmp_path / "a.json") == ["cat", "dog"]


def test_class_names_by_number_are_put_in_order(tmp_path: Path) -> None:
    names = {str(i): f"n{i}" for i in (10, 2, 0, 1, *range(3, 10))}
    (tmp_path / "a.json").write_text(json.dumps(names))
    assert models.read_classes(tmp_path / "a.json") == [f"n{i}" for i in range(11)]


@pytest.mark.parametrize("text", ['{"0": "cat", "2": "dog"}', '{"cat": 0}', '"cat"', "[1, 2", "{}x"])
def test_class_names_that_cannot_be_read_are_refused_with_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(Trouble, match=r"names\.json"):
        models.read_classes(tmp_path / "names.json")


def test_a_folder_with_weights_is_not_random(tmp_path: Path) -> None:
    assert models.is_random(f"transformers:{tmp_path}", None, False)
    (tmp_path / "model.safetensors").touch()
    assert not models.is_random(f"transformers:{tmp_path}", None, False)
    assert not models.is_random("torchvision:resnet18", None, True)
    assert not models.is_random("timm:resnet18", tmp_path, False)
    assert not models.is_random("tests.cli.nets:small", None, False)


def test_random_weights_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="--pretrained to fetch its own, --weights FILE for others, or --random"):
        models.refuse_random("timm:resnet18", None, False)
    models.refuse_random("timm:resnet18", None, True)
    models.refuse_random("timm:resnet18", tmp_path, False)
    models.refuse_random("tests.cli.nets:small", None, False)
