"""Class activation maps beside grad-cam and torchcam: the cost of one, and whether it is right.

    python benchmarks/cam.py [--json results.json]

The ratio is to a forward and a backward pass of the plain model. What is right is computed by hand: the layer's output
cloned in a bare hook, its gradient by a hook on that tensor, their product. The second layer is one that the next
overwrites in place.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from capture import message
from models import import_torchvision
from results import Report, Row
from timing import ratios
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

CLASS = 7
LAYERS = {"layer4": "a whole stage", "layer4.1.bn1": "overwritten by the ReLU after it"}


def by_hand(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The map at the layer's own size, not stretched."""
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(output.detach().clone())
        output.register_hook(lambda grad: kept.append(grad.clone()))

    handle = model.get_submodule(layer).register_forward_hook(hook)
    model(x)[:, CLASS].sum().backward()
    handle.remove()
    value, gradient = kept
    return F.relu((gradient.mean((2, 3), keepdim=True) * value).sum(1)).detach()


def ours(model: nn.Module, layer: str, x: Tensor) -> Callable[[], Tensor]:
    return lambda: th.cam(model, x, CLASS, layer).map


def grad_cam(model: nn.Module, layer: str, x: Tensor) -> Callable[[], Tensor]:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    def run() -> Tensor:
        with GradCAM(model=model, target_layers=[model.get_submodule(layer)]) as cam:
            return torch.from_numpy(cam(input_tensor=x, targets=[ClassifierOutputTarget(CLASS)] * len(x)))

    return run


def torchcam(model: nn.Module, layer: str, x: Tensor) -> Callable[[], Tensor]:
    from torchcam.methods import GradCAM

    def run() -> Tensor:
        with GradCAM(model, target_layer=layer) as cam:
            return cam([CLASS] * len(x), model(x))[0]

    return run


WAYS = {"torchhook": ours, "grad-cam": grad_cam, "torchcam": torchcam}


def wrong_maps(found: Tensor, true: Tensor) -> int:
    """Maps that do not agree with those by hand, whatever their size and scale: their correlation is below 0.99."""
    true = F.interpolate(true[:, None].float(), found.shape[1:], mode="bilinear", align_corners=False)[:, 0]
    return sum(
        not float(torch.corrcoef(torch.stack(pair))[0, 1]) > 0.99 for pair in zip(*_flat(found, true), strict=True)
    )


def _flat(*maps: Tensor) -> list[Tensor]:
    return [values.detach().float().flatten(1) for values in maps]


def rows(seconds: float) -> Iterator[Row]:
    torch.manual_seed(0)
    model, x = import_torchvision().models.resnet18(weights=None).eval(), torch.randn(4, 3, 128, 128)
    plain = copy.deepcopy(model)
    for layer, what in LAYERS.items():
        work = f"Grad-CAM of ResNet-18 at {layer}, {what}"
        true = by_hand(copy.deepcopy(model), layer, x)
        runs: dict[str, Callable[[], object]] = {"plain": lambda: plain(x)[:, CLASS].sum().backward()}
        wrong: dict[str, int] = {}
        for way, make in WAYS.items():
            try:
                run = make(copy.deepcopy(model), layer, x)
                wrong[way] = wrong_maps(run(), true)
                runs[way] = run
            except Exception as error:  # noqa: PERF203  one peer that fails leaves the others
                yield Row(work, way, None, note=message(error))
        found = ratios(runs, rounds=50, repeat=1, seconds=seconds, clock=time.process_time)
        for way, count in wrong.items():
            ratio = found[way]
            between = {"low": ratio.low, "high": ratio.high}
            yield Row(work, way, ratio.median, wrong=count, values=len(x), **between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("Class activation maps, on a CPU", options.json)
    for row in rows(options.seconds):
        report.add(row)
    report.close()


if __name__ == "__main__":
    main()
