"""``count_parameters`` and ``model_summary``, as TorchHook 0.2 has them."""

from __future__ import annotations

from torch import nn

from torchhook._core.index import Index
from torchhook._layers.api import numel
from torchhook._recording.tables import count
from torchhook.errors import ArgumentError

_RULE = "-" * 80


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """The number of parameters, tied weights counted once."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"'model' must be a torch.nn.Module, found {type(model).__name__}.")
    return sum(numel(p) for p in model.parameters() if p.requires_grad or not trainable_only)


def model_summary(model: nn.Module, max_depth: int = -1, show_zero_params: bool = True) -> None:
    """Print the parameters of a model and of each layer; a tied weight counts in every layer, and once in the total."""
    total, trainable = count_parameters(model), count_parameters(model, trainable_only=True)
    wide = "=" * 80
    lines = [wide, f"Model Summary: {type(model).__name__}", _RULE]
    for title, number in (("Total", total), ("Trainable", trainable), ("Non-trainable", total - trainable)):
        lines.append(f"{title} Parameters: {count(number)}")
    lines += [_RULE, f"{'Layer Name':<40} {'Total Params':<20} {'Trainable Params':<20}", wide]
    listed: set[tuple[str, int]] = set()
    for path, module in Index(model).modules.items():
        own = list(module.parameters(recurse=False))
        depth = path.count(".")  # from 0, as in TorchHook 0.2; ``layers`` counts levels from 1
        place = path.rpartition(".")[0], id(module)
        # A child that its parent has under two names is one child, as ``named_children`` has it.
        if not path or place in listed or (max_depth != -1 and depth > max_depth) or not (own or show_zero_params):
            continue
        listed.add(place)
        sizes = [sum(map(numel, own)), sum(numel(p) for p in own if p.requires_grad)]
        lines.append(f"{'  ' * depth + path:<40} {count(sizes[0]):<20} {count(sizes[1]):<20}")
    print("\n".join([*lines, wide]))
