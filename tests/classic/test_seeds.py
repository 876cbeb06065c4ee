"""The code of the documents that TorchHook starts from, run as it is written there.

Changed are only imports of other packages that torchhook stands for, weights that would have to be downloaded, image
paths and batch sizes. What a document prints is compared to the letter.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

models = pytest.importorskip("torchvision.models")


def execute(code: str, **names: Any) -> tuple[str, dict[str, Any]]:
    """Run a snippet; return what it printed and the names it left."""
    space = {"__name__": "seed", **names}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(textwrap.dedent(code), "<seed>", "exec"), space)
    return out.getvalue(), space


def clean(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


# -- the first: HookManager --------------------------------------------------------------------------

QUICK_START = """
import torch
import torchvision.models as models
# Import our library TorchHook
from torchhook import HookManager

# 1. Load your model
model = models.resnet18()
model.eval() # Set to evaluation mode

# 2. Initialize HookManager
# max_size=1 means each hook only keeps the latest feature map
hook_manager = HookManager(model, max_size=1)

# 3. Register the layers you are interested in
# Register by layer name
# Layer names can be obtained from dict(model.named_modules()).keys()
hook_manager.register_forward_hook(layer_name='conv1')
# You can also use the alias 'add'
hook_manager.add(layer_name='layer4.1.relu')
# Or pass the layer object directly
target_layer = model.fc
hook_manager.add(layer_name='fully_connected', layer=target_layer) # Providing a name is recommended

# 4. Perform the model's forward pass
dummy_input = torch.randn(1, 3, 224, 224)
with torch.no_grad():
    output = model(dummy_input)

# 5. Get the features
features_conv1 = hook_manager.get_features('conv1') # Get the list of features for 'conv1'
features_relu = hook_manager.get_features('layer4.1.relu') # Get the list of features for 'layer4.1.relu'
all_features = hook_manager.get_all() # Get a dictionary containing all captured features

print(f"Conv1 feature shape: {features_conv1[0].shape}")
print(f"Layer 4.1 ReLU feature shape: {features_relu[0].shape}")

# 6. View Hook status summary
hook_manager.summary()
# Or print(hook_manager)
"""

CLEAN_UP = """
# 7. Clean up hooks (Important!)
hook_manager.clear_hooks()
"""

EXAMPLE_OUTPUT = """\
Conv1 feature shape: torch.Size([1, 64, 112, 112])
Layer 4.1 ReLU feature shape: torch.Size([1, 512, 7, 7])
Model: ResNet | Total Parameters: 11.69 M
Registered Hooks: 3 (max_size=1)
--------------------------------------------------------------------------------
Captured Features Summary:
Layer Key                     Feature Count       Feature Shape
--------------------------------------------------------------------------------
conv1                         1                   (1, 64, 112, 112)
layer4.1.relu                 1                   (1, 512, 7, 7)
fully_connected               1                   (1, 1000)
--------------------------------------------------------------------------------
"""

CUSTOM_HOOK = """
def my_custom_hook(module, input, output):
    # Example: Only save the mean of positive values in the output tensor
    if isinstance(output, torch.Tensor):
        positive_mean = output[output > 0].mean()
        # Note: custom_hook needs to return a Tensor or None
        # Here we return a Tensor containing a single value
        return torch.tensor([positive_mean])
    return None # Return None if not saving

hook_manager.add(layer_name='layer1.0.conv1', custom_hook=my_custom_hook)

with torch.no_grad():
    output = model(dummy_input)

custom_features = hook_manager.get_features('layer1.0.conv1')
if custom_features:
    print(f"Custom feature (positive mean): {custom_features[0].item()}")
"""

OUTPUT_TRANSFORM = """
def apply_softmax(output_tensor):
    # Assume the output is logits
    return torch.softmax(output_tensor, dim=-1).detach().cpu()

# Assume the 'fc' layer outputs logits
hook_manager.add(layer_name='fc', output_transform=apply_softmax)

with torch.no_grad():
    output = model(dummy_input)

softmax_output = hook_manager.get_features('fc')
if softmax_output:
    print(f"Softmax output shape: {softmax_output[0].shape}")
"""


def test_the_first_seed_prints_its_example_output_to_the_letter() -> None:
    out, names = execute(QUICK_START)
    assert out == EXAMPLE_OUTPUT
    again, _ = execute("print(hook_manager)", **names)
    assert again == "\n".join(EXAMPLE_OUTPUT.splitlines()[2:]) + "\n"
    model, x = names["model"], names["dummy_input"]
    with torch.no_grad():
        assert torch.equal(names["features_conv1"][0], model.conv1(x))
    assert list(names["all_features"]) == ["conv1", "layer4.1.relu", "fully_connected"]
    assert torch.equal(names["all_features"]["fully_connected"][0], names["output"])
    out, _ = execute(CLEAN_UP, **names)
    assert out == ""
    assert clean(model)


def test_the_first_seeds_advanced_usage_runs() -> None:
    _, names = execute(QUICK_START)
    out, names = execute(CUSTOM_HOOK, **names)
    model, x = names["model"], names["dummy_input"]
    with torch.no_grad():
        seen = model.layer1[0].conv1(model.maxpool(torch.relu(model.bn1(model.conv1(x)))))
        logits = model(x)
    assert out == f"Custom feature (positive mean): {seen[seen > 0].mean().item()}\n"
    out, names = execute(OUTPUT_TRANSFORM, **names)
    assert out == "Softmax output shape: torch.Size([1, 1000])\n"
    assert torch.allclose(names["softmax_output"][0], logits.softmax(-1))
    execute(CLEAN_UP, **names)
    assert clean(model)


# -- the second: features of VGG-11 ---------------------------------------------------------------------

BARE_HOOK = """
# a globally accessible placeholder for capturing the output of the layer
feat_out = None


def hook(module, inp, out):
    global feat_out  # not the best way to reference `feat_out` though
    feat_out = out

h = model.features[5].register_forward_hook(hook)
"""

IMAGE = """
from PIL import Image
import torchvision.transforms as transforms

# specify image transform and normalize
transform = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)
# load image from local path
image = Image.open(PATH)
# apply transform and normalize and add the batch dimension
image = transform(image).unsqueeze(0)
"""

CANDIDATES = """
import torchhook as tl
layers = tl.get_layer_candidates(model, max_depth=2)  # we can specify a max_depth
print([l for l in layers])
"""

# The document prints the list on one line.
PRINTED_CANDIDATES = (
    "['features', 'features.0', 'features.1', 'features.2', 'features.3', 'features.4', 'features.5', 'features.6', "
    "'features.7', 'features.8', 'features.9', 'features.10', 'features.11', 'features.12', 'features.13', "
    "'features.14', 'features.15', 'features.16', 'features.17', 'features.18', 'features.19', 'features.20', "
    "'avgpool', 'classifier', 'classifier.0', 'classifier.1', 'classifier.2', 'classifier.3', 'classifier.4', "
    "'classifier.5', 'classifier.6']\n"
)

ONE_LAYER = """
import torchhook as tl

f_layer_path = "features.5"  # notice how we represent the 5th layer
hooked_model = tl.FeatureLayer(model, f_layer_path)

feat_out, output = hooked_model(image)  # the layer output and the model output are both returned
"""

MANY_LAYERS = """
import torchhook as tl

f_layer_paths = [
  "features.0",
  "features.6",
  "features.12",
  "features.18",
]
hooked_model = tl.FeatureLayers(model, f_layer_path)

feat_outs, output = hooked_model(image)  # the layer outputs are returned in a list
"""

FEATURE_MAP = """
fmap = feat_out.mean(dim=1).squeeze()  # flatten to image-like shape
fmap = fmap.cpu().detach().numpy()  # move to cpu
fmap = (fmap - fmap.min()) / (fmap.max() - fmap.min())
"""

PICTURE = """
import matplotlib.pyplot as plt

plt.figure(figsize=(4, 4))
plt.imshow(fmap, cmap="viridis")
plt.axis("off")
plt.tight_layout(pad=0)

plt.show()
"""


@pytest.fixture(scope="module")
def vgg11() -> nn.Module:
    torch.manual_seed(0)
    return models.vgg11(init_weights=False).eval()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for the document's own photograph."""
    image = pytest.importorskip("PIL.Image")
    path = tmp_path_factory.mktemp("seed") / "image.png"
    rows, columns = np.mgrid[0:300, 0:400]
    image.fromarray(np.stack([rows % 256, columns % 256, (rows + columns) % 256], -1).astype(np.uint8)).save(path)
    return path


def test_the_second_seed_lists_the_layers_it_printed() -> None:
    with torch.device("meta"):
        model = models.vgg11()
    out, _ = execute(CANDIDATES, model=model)
    assert out == PRINTED_CANDIDATES


def test_the_second_seed_gets_the_features_that_its_bare_hook_gets(vgg11: nn.Module, picture: Path) -> None:
    _, names = execute(IMAGE, PATH=str(picture))
    image = names["image"]
    assert image.shape == (1, 3, 224, 224)
    _, names = execute(BARE_HOOK + "\noutput = model(image)\nh.remove()", model=vgg11, image=image)
    bare, output = names["feat_out"], names["output"]
    assert bare.shape == (1, 128, 56, 56)

    _, names = execute(ONE_LAYER, model=vgg11, image=image)
    assert torch.equal(names["feat_out"], bare)
    assert torch.equal(names["output"], output)
    assert clean(vgg11)

    _, mapped = execute(FEATURE_MAP, feat_out=names["feat_out"])
    assert mapped["fmap"].shape == (56, 56)
    assert (mapped["fmap"].min(), mapped["fmap"].max()) == (0, 1)


@pytest.mark.parametrize("as_written", [True, False])
def test_the_second_seed_gets_many_layers_at_once(vgg11: nn.Module, as_written: bool) -> None:
    """As written, the document passes the one path of the example before it; it means the four."""
    image = torch.rand(1, 3, 224, 224)
    code = MANY_LAYERS if as_written else MANY_LAYERS.replace("f_layer_path)", "f_layer_paths)")
    with torch.no_grad():
        _, names = execute(code, model=vgg11, image=image, f_layer_path="features.5")
        expected = {}
        value = image
        for place, layer in enumerate(vgg11.features):
            value = layer(value)
            expected[f"features.{place}"] = value.clone()  # the layers after it work in place
        output = vgg11(image)
    paths = ["features.5"] if as_written else names["f_layer_paths"]
    assert isinstance(names["feat_outs"], list)
    assert len(names["feat_outs"]) == len(paths)
    for path, feature in zip(paths, names["feat_outs"], strict=True):
        assert torch.equal(feature, expected[path])
        assert feature is names["feat_outs"][path]
    assert torch.equal(names["output"], output)


def test_the_second_seeds_picture_is_drawn() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fmap = np.linspace(0, 1, 16).reshape(4, 4)
    shown: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "show", lambda: shown.append(1))
        execute(PICTURE, fmap=fmap)
    assert shown == [1]
    assert np.array_equal(plt.gcf().axes[0].images[0].get_array(), fmap)
    plt.close("all")


# -- the third: verbose execution, feature extraction, gradient clipping -----------------------------------

VERBOSE = """
import torch
from torch import nn, Tensor
from torchvision.models import resnet50
from torchhook import VerboseExecution

def test():
    verbose_resnet = VerboseExecution(resnet50())
    dummy_input = torch.ones(2, 3, 224, 224)
    _ = verbose_resnet(dummy_input)

test()
"""

PRINTED_VERBOSE = """\
conv1: torch.Size([2, 64, 112, 112])
bn1: torch.Size([2, 64, 112, 112])
relu: torch.Size([2, 64, 112, 112])
maxpool: torch.Size([2, 64, 56, 56])
layer1: torch.Size([2, 256, 56, 56])
layer2: torch.Size([2, 512, 28, 28])
layer3: torch.Size([2, 1024, 14, 14])
layer4: torch.Size([2, 2048, 7, 7])
avgpool: torch.Size([2, 2048, 1, 1])
fc: torch.Size([2, 1000])
"""

EXTRACTOR = """
import torch
from torchvision.models import resnet50
from torchhook import FeatureExtractor

def test():
    dummy_input = torch.ones(2, 3, 224, 224)
    resnet_features = FeatureExtractor(resnet50(), ["layer4", "avgpool"])
    features = resnet_features(dummy_input)
    print({name: output.shape for name, output in features.items()})
    return features

features = test()
"""

CLIPPER = """
import torch
from torchvision.models import resnet50
from torchhook import gradient_clipper

dummy_input = torch.ones(2, 3, 64, 64)

def test():
    clipped_resnet = gradient_clipper(resnet50(), 0.001)
    pred = clipped_resnet(dummy_input)
    loss = pred.log().mean()
    loss.backward()
    print(clipped_resnet.fc.bias.grad[: 25])
    return clipped_resnet

clipped_resnet = test()
"""


def test_the_third_seed_prints_the_shapes_of_resnet50() -> None:
    out, _ = execute(VERBOSE)
    assert out == PRINTED_VERBOSE


def test_the_third_seed_extracts_features_by_name() -> None:
    out, names = execute(EXTRACTOR)
    assert out == "{'layer4': torch.Size([2, 2048, 7, 7]), 'avgpool': torch.Size([2, 2048, 1, 1])}\n"
    features = names["features"]
    assert torch.allclose(features["layer4"].mean((2, 3), keepdim=True), features["avgpool"], atol=1e-6)
    assert features["layer4"].requires_grad


def test_the_third_seed_clips_every_gradient() -> None:
    out, names = execute(CLIPPER)
    assert out.startswith("tensor([")
    gradients = [p.grad for p in names["clipped_resnet"].parameters()]
    assert all(g is not None for g in gradients)
    finite = torch.cat([g.flatten() for g in gradients]).nan_to_num(0)  # the logarithm of a negative number is NaN
    assert finite.abs().max() <= 0.001


# -- the fourth: Hook ----------------------------------------------------------------------------------------

HOOK = """
from torchhook import Hook

hook = Hook()
handle = model.features.register_forward_hook(hook)
for sample in iter(loader):
    model(sample['image'])
handle.remove()

hook_salt = hook
inputs = []
for input in hook_salt.features_in_hook:
    inputs.append(input[0])
feature_maps = []
for feature_map in hook_salt.features_out_hook:
    feature_maps.append(feature_map)
"""


def test_the_fourth_seed_collects_inputs_and_feature_maps_over_a_loader() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
            self.after = nn.ReLU6(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.features(x).mul_(100))

    data = [{"image": torch.rand(3, 8, 8)} for _ in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    model = Small()
    _, names = execute(HOOK, model=model, loader=loader)
    assert names["hook"].module_name == [nn.Sequential, nn.Sequential]
    for batch, inputs, maps in zip(loader, names["inputs"], names["feature_maps"], strict=True):
        assert torch.equal(inputs, batch["image"])
        assert torch.equal(maps, model.features(batch["image"]))
    assert clean(model)


# -- the fifth: features and gradients in the middle of VGG-16 --------------------------------------------------

MIDDLE = """
import torch
from torch import nn
import torch.nn.functional as F
import numpy as np
from PIL import Image
from torchvision import models
from torchvision.transforms.functional import normalize, resize, to_tensor, to_pil_image

model = models.vgg16_bn(weights=None, init_weights=False).eval()

# 建立一个全局变量的字典，将特征图放在其中
feature_map = {}

# 构建hook函数
def forward_hook(module, inp, outp):
    feature_map['features18'] = outp

# 获取第18层的layer
features = list(model.children())[0]
hook_layer = features[18]

# 对第18层的layer注册hook
hook_layer.register_forward_hook(forward_hook)

# 进行一次前向传播，此时对应的第18层的特征图就出现在feature_map里了
with torch.no_grad():
    score = model(input_img)
"""

THE_SAME_HERE = """
import torchhook as th

with th.capture(model, "features.18") as rec:
    with torch.no_grad():
        score = model(input_img)
"""

GRADIENTS = """
import torchhook as th

with th.capture(model, "features.18:grad") as rec:
    model(input_img)[0, 5].backward()
with th.edit(model, {"features.18:grad": lambda grad: grad * 0}):
    model.zero_grad()
    model(input_img)[0, 5].backward()
"""


def test_the_fifth_seed_gets_features_and_gradients_in_the_middle() -> None:
    torch.manual_seed(0)
    image = torch.rand(1, 3, 64, 64)
    _, names = execute(MIDDLE, input_img=image)
    model, kept = names["model"], names["feature_map"]["features18"]
    names["hook_layer"]._forward_hooks.clear()

    _, found = execute(THE_SAME_HERE, model=model, input_img=image, torch=torch)
    tensor = model.features[:19](image).detach().requires_grad_()
    assert torch.equal(found["rec"]["features.18"], tensor)
    assert torch.equal(kept, tensor.relu())  # the document's own hook keeps what the next layer, in place, made of it
    assert torch.equal(found["score"], names["score"])

    rest = nn.Sequential(*model.features[19:], model.avgpool, nn.Flatten(), model.classifier)
    (expected,) = torch.autograd.grad(rest(tensor * 1)[0, 5], tensor)
    _, found = execute(GRADIENTS, model=model, input_img=image)
    assert torch.allclose(found["rec"]["features.18:grad"], expected, atol=1e-7)
    assert model.features[0].weight.grad.abs().max() == 0
    assert model.features[24].weight.grad.abs().max() > 0
    assert clean(model)
