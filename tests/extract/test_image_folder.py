"""Folders of images, prepared as the model's own settings say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._extract.image_folder import ImageFolder
from torchhook.errors import DataWarning, ExtractError

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


# Odd and even remainders on either side, tall and wide, smaller than the crop, a strip; chelsea is 451 × 300.
@pytest.mark.parametrize(
    "size", [(451, 300), (300, 451), (257, 384), (500, 333), (333, 500), (601, 401), (224, 224), (37, 90), (1000, 61)]
)
def test_the_preparation_for_imagenet_is_torchvisions_to_the_pixel(tmp_path, size):
    vision = pytest.importorskip("torchvision").transforms
    own = vision.Compose(
        [
            vision.Resize(256),
            vision.CenterCrop(224),
            vision.ToTensor(),
            vision.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert torch.equal(ImageFolder(tmp_path).load("a.png"), own(Image.fromarray(pixels)))


@pytest.mark.parametrize(("resize", "crop"), [(232, 224), (235, 224), (342, 299), (518, 518), (70, 65)])
def test_any_crop_and_interpolation_is_cut_as_torchvision_cuts(tmp_path, resize, crop):
    vision = pytest.importorskip("torchvision").transforms
    bicubic = vision.InterpolationMode.BICUBIC
    own = vision.Compose([vision.Resize(resize, bicubic), vision.CenterCrop(crop), vision.ToTensor()])
    pixels = np.random.default_rng(0).integers(0, 255, (300, 451, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    ours = ImageFolder(
        tmp_path, size=crop, crop=crop / resize, interpolation="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3
    )
    assert ours.preparation.startswith(f"bicubic to {resize}, cropped to {crop} × {crop}")
    assert torch.equal(ours.load("a.png"), own(Image.fromarray(pixels)))


def test_a_path_is_enough(folder, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.warns(DataWarning, match=r"as for ImageNet: bilinear to 256, cropped to 224 × 224, mean 0.485.*size="):
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


# -- images of every kind ----------------------------------------------------------------------------


def plain(folder, name):
    """One image as numbers from 0 to 1, neither resized nor cropped."""
    with Image.open(folder / name) as opened:
        size = opened.size[::-1]
    found = ImageFolder(folder, size=size, crop=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    return found.load(name)


def test_photographs_are_turned_as_the_camera_was_held(tmp_path):
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[0, :, 0] = 255  # red on top
    for orientation, turned in (
        (1, pixels),
        (3, np.rot90(pixels, 2)),
        (6, np.rot90(pixels, -1)),
        (8, np.rot90(pixels)),
    ):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
        data = ImageFolder(tmp_path, size=turned.shape[:2], crop=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
        assert torch.equal(data.load("a.png"), torch.from_numpy(turned.copy()).permute(2, 0, 1) / 255)


def test_sixteen_bits_and_floats_keep_their_brightness(tmp_path):
    gray = np.array([[0.0, 0.2], [0.4, 1.0]])
    Image.fromarray((gray * 65535).round().astype(np.uint16)).save(tmp_path / "a.png")
    Image.fromarray((gray * 65535).round().astype(np.uint16)).save(tmp_path / "a.tiff")
    Image.fromarray((gray * 65535).round().astype(np.int32)).save(tmp_path / "i.tiff")
    Image.fromarray(gray.astype(np.float32)).save(tmp_path / "f.tiff")
    Image.fromarray((gray * 255).round().astype(np.uint8)).save(tmp_path / "b.png")
    for name in ("a.png", "a.tiff", "i.tiff", "f.tiff", "b.png"):
        torch.testing.assert_close(plain(tmp_path, name), torch.from_numpy(gray).float().expand(3, 2, 2))


@pytest.mark.parametrize(
    ("pixels", "text"),
    [
        (np.array([[0.0, 255.0]], dtype=np.float32), "float pixels from 0 to 255, expected 0 to 1"),
        (np.array([[0.0, np.nan]], dtype=np.float32), "float pixels from nan to nan"),
        (np.array([[-5, 70000]], dtype=np.int32), "integer pixels from -5 to 70000, expected 0 to 65535"),
    ],
)
def test_pixels_without_a_known_range_are_refused(tmp_path, pixels, text):
    Image.fromarray(pixels).save(tmp_path / "odd.tiff")
    with pytest.raises(ValueError, match=rf"odd\.tiff: {text}"):
        plain(tmp_path, "odd.tiff")


def test_names_that_are_no_text_are_stored_so_that_one_can_read_them(tmp_path):
    import os

    folder = tmp_path / "images"
    folder.mkdir()
    odd = os.path.join(os.fsencode(folder), b"caf\xe9.png")
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "a.png")
    try:
        os.rename(os.path.join(os.fsencode(folder), b"a.png"), odd)
    except OSError:
        pytest.skip("this file system takes only text for names")
    Image.new("RGB", (8, 8), (0, 0, 255)).save(folder / "ü.png")
    features = extract(
        nn.Sequential(nn.Identity()),
        ImageFolder(folder),
        "0",
        tmp_path / "f",
        transform=transforms.pool(),
        progress=False,
    )
    assert sorted(features.ids) == ["caf\\xe9.png", "ü.png"]
    assert features["0"][list(features.ids).index("caf\\xe9.png")][0] > 2  # red


# -- prepared by the libraries themselves ---------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"size": 96, "crop": 1.0}, {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}])
def test_images_for_a_model_of_timm_are_prepared_by_timm(folder, changes):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224")
    config = timm.data.resolve_model_data_config(model)
    if "size" in changes:
        config |= {"input_size": (3, 96, 96), "crop_pct": 1.0}
    config |= {name: value for name, value in changes.items() if name in ("mean", "std")}
    prepare = timm.data.create_transform(**config, is_training=False)
    data = ImageFolder.for_model(folder, model, **changes)
    for i, name in enumerate(data.ids):
        assert torch.equal(data[i][0], prepare(Image.open(folder / name).convert("RGB")))


def test_any_function_of_an_image_prepares_it(folder, tmp_path):
    vision = pytest.importorskip("torchvision")
    prepare = vision.models.get_model_weights("resnet18").DEFAULT.transforms()
    data = ImageFolder(folder, prepare=prepare)
    assert torch.equal(data[0][0], prepare(Image.open(folder / "cat/a.png").convert("RGB")))
    features = extract(nn.Sequential(nn.Flatten()), data, "0", tmp_path / "f", progress=False)
    assert torch.equal(features["0"][0], data[0][0].flatten())


# -- what was used is said --------------------------------------------------------------------------------


def test_the_preparation_and_the_classes_are_kept_with_the_features(folder, tmp_path):
    data = ImageFolder(folder, size=16, crop=0.8, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert data.preparation == "bilinear to 20, cropped to 16 × 16, mean 0.5, 0.5, 0.5, std 0.25, 0.25, 0.25"
    for name, rows in (("f", data), ("g", torch.utils.data.Subset(data, [3, 0]))):
        features = extract(nn.Sequential(nn.Flatten()), rows, "0", tmp_path / name, progress=False)
        assert features.classes == ["cat", "dog", "dog/deep"]
        assert f"images: {data.preparation}" in str(features)
        assert "classes: cat, dog, dog/deep" in str(features)
    features = extract(nn.Sequential(nn.Flatten()), data, "0", tmp_path / "h", labels=False, progress=False)
    assert features.classes is None


def test_a_function_that_prepares_images_is_shown_on_one_line(folder):
    class Prepares:
        def __call__(self, image):
            return torch.zeros(3, 4, 4)

        def __repr__(self):
            return "Prepares(\n    size=4\n)"

    assert ImageFolder(folder, prepare=Prepares()).preparation == "Prepares(size=4)"
    assert " at 0x" not in ImageFolder(folder, prepare=lambda image: image).preparation


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_with_its_row_and_what_can_be_done(folder, tmp_path, workers):
    (folder / "dog" / "x.PNG").write_bytes(b"nonsense")
    data = ImageFolder(folder, size=8)
    told = r"dog/x\.PNG, row 3 of the data, cannot be read as an image: .*\. Repair or remove it, or pass on_error="
    with pytest.raises(ExtractError, match=told) as caught:
        extract(nn.Sequential(nn.Flatten()), data, "0", tmp_path / "f", workers=workers, progress=False)
    assert "Traceback" not in str(caught.value)
    found = extract(nn.Sequential(nn.Flatten()), data, "0", tmp_path / "f", on_error="skip", progress=False)
    assert list(found.skipped) == [3]
    assert "on_error" not in found.skipped[3]
