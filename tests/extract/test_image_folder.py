"""Folders of images, prepared as the model's own settings say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._extract.image_folder import ImageFolder
from torchhook.errors import ExtractError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for i, name in enumerate(["cat/b.png", "cat/a.png", "dog/x.PNG", "dog/deep/y.png"]):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40 + i, 60, 3), dtype=np.uint8)).save(path)
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def test_images_come_in_the_order_of_their_paths_with_their_folders_as_labels(folder):
    data = ImageFolder(folder, size=32)
    assert data.ids == ["cat/a.png", "cat/b.png", "dog/deep/y.png", "dog/x.PNG"]
    assert data.classes == ["cat", "dog", "dog/deep"]
    assert [label for _, label in data] == [0, 0, 2, 1]
    assert data[0][0].shape == (3, 32, 32)


def test_pixels_are_cropped_in_the_middle_and_normalised(folder):
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    image[16:48, 16:48] = 255
    Image.fromarray(image).save(folder / "cat" / "a.png")
    data = ImageFolder(folder, size=32, crop=0.5, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    pixels = data.load("cat/a.png")
    assert torch.equal(pixels[:, 5, 5], torch.tensor([2.0, 1.0, 0.5]))
    assert pixels.min() > 0  # nothing of the black border


def test_settings_are_taken_from_the_model(folder):
    model = nn.Identity()
    model.pretrained_cfg = {
        "input_size": (3, 48, 40),
        "mean": (0.1, 0.2, 0.3),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    data = ImageFolder.for_model(folder, model)
    assert data.size == (48, 40)
    assert data.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert data[0][0].shape == (3, 48, 40)
    assert ImageFolder.for_model(folder, nn.Identity()).size == (224, 224)


def test_a_path_is_enough(folder, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    features = extract(model, folder, "0", tmp_path / "f", transform=transforms.pool("mean"), progress=False)
    assert list(features.ids) == ["cat/a.png", "cat/b.png", "dog/deep/y.png", "dog/x.PNG"]
    assert features.labels[:].tolist() == [0, 0, 2, 1]
    image = ImageFolder(folder).load("dog/x.PNG")
    with torch.no_grad():
        assert torch.allclose(features["0"][3], model(image[None]).mean((2, 3))[0], atol=1e-5)


def test_torchvision_folders_bring_their_paths(folder, tmp_path):
    vision = pytest.importorskip("torchvision")
    prepare = vision.transforms.Compose([vision.transforms.Resize((8, 8)), vision.transforms.ToTensor()])
    data = vision.datasets.ImageFolder(str(folder), transform=prepare)
    features = extract(nn.Sequential(nn.Flatten()), data, "0", tmp_path / "f", progress=False)
    assert list(features.ids) == [path for path, _ in data.samples]
    assert features.labels[:].tolist() == data.targets


def test_an_empty_or_absent_folder_is_an_error(tmp_path):
    with pytest.raises(ExtractError, match="no images below"):
        ImageFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        ImageFolder(tmp_path / "nowhere")
