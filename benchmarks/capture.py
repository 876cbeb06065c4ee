"""What capturing a layer costs, beside a bare hook that does ``store[name] = output.detach().clone()``.

On a chain of 100 small ``Linear`` layers the model itself costs next to nothing, so that what is left is the cost of
the hooks. "steady" runs the model in one open session; "whole" opens a session for every call. On a real network the
copies count: copy-on-write makes them only where the next layer overwrites the value.
Peers take part when they are installed.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from timing import compare
from torch import Tensor, nn

import torchhook as th
from torchhook.demo import efficientnet_lite0


class Bare:
    """What people write by hand, at its best: true values, hooks removed."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.store: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        self.handles = [modules[name].register_forward_hook(self.hook(name)) for name in names]

    def hook(self, name: str) -> Callable[..., None]:
        store = self.store

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            store[name] = output.detach().clone()

        return keep

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def ratios(model: nn.Module, x: Tensor, rounds: int, repeat: int) -> dict[str, float]:
    """Cost per call over that of the plain model, in units of what bare cloning hooks cost."""
    names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]

    def calls(hooked: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeat):
                hooked(x)

        return run

    def bare_whole(x: Tensor) -> None:
        bare = Bare(model, names)
        model(x)
        bare.remove()

    def whole(x: Tensor) -> None:
        with th.capture(model, names):
            model(x)

    with ExitStack() as stack:
        bare_model, captured_model = copy.deepcopy(model), copy.deepcopy(model)
        Bare(bare_model, names)
        stack.enter_context(th.capture(captured_model, names, max_records=1))
        contestants = {
            "plain": calls(model),
            "bare hook, steady": calls(bare_model),
            "torchhook, steady": calls(captured_model),
            "bare hook, whole": calls(bare_whole),
            "torchhook, whole": calls(whole),
        }
        contestants |= {name: calls(hooked) for name, hooked in peers(model, names).items()}
        seconds = compare(contestants, rounds=rounds, repeat=1)
    unit = seconds["bare hook, steady"] - seconds["plain"]
    found = {name: (value - seconds["plain"]) / unit for name, value in seconds.items() if name != "plain"}
    found["(plain forward, in the same unit)"] = seconds["plain"] / unit
    return found


def peers(model: nn.Module, names: list[str]) -> dict[str, Callable[[Tensor], object]]:
    found: dict[str, Callable[[Tensor], object]] = {}
    with suppress(ImportError):
        import torch_featurelayer

        found["torch-featurelayer (not true)"] = torch_featurelayer.FeatureLayers(model, names)
    with suppress(ImportError):
        from baukit import TraceDict

        def baukit(x: Tensor) -> None:
            with TraceDict(model, names, clone=True, detach=True):
                model(x)

        found["baukit"] = baukit
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here too")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))).eval()
    results: dict[str, dict[str, float]] = {}
    for mode, context in {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad}.items():
        with context():
            results[f"100 × Linear(16), {mode}"] = ratios(chain, torch.randn(4, 16), options.rounds, repeat=5)
    with torch.no_grad():
        model, images = efficientnet_lite0(), torch.randn(4, 3, 224, 224)
        results["EfficientNet-Lite0, 4×3×224×224, no_grad"] = ratios(
            model, images, max(options.rounds // 5, 5), repeat=1
        )
    for title, figures in results.items():
        print(f"\n{title}: cost of capturing every layer, bare hook = 1")
        for name, ratio in figures.items():
            print(f"  {name:<38}{ratio:6.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
