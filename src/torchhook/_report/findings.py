"""What looks wrong in a run: values that are not finite, dead channels, layers that stayed silent."""

from __future__ import annotations

from collections.abc import Iterator

from torchhook._recording.tables import digits
from torchhook._report.facts import Issue, LayerFacts, Numbers

_DEAD = 0.1  # of the channels: on one input, a few that stay silent are what a ReLU is for


def findings(layers: list[LayerFacts]) -> list[Issue]:
    """Every kind of trouble that was found, the worst first."""
    # A shared module has one run: under its other names it would be counted again.
    own = [(i, layer) for i, layer in enumerate(layers) if layer.shared_with is None]
    kinds = [
        Issue(
            "nan",
            "NaN or Inf",
            "The first layer listed is where it begins; th.guard names the operation that made it.",
            # By the time of return, not the place in the tree: a block returns after the part that spoilt it.
            [(i, note) for i, layer in sorted(own, key=lambda it: _first(it[1])) if (note := _not_finite(layer))],
        ),
        Issue(
            "silent",
            "Never ran",
            "The model holds these layers and did not call them on this input.",
            [(i, layer.silent) for i, layer in own if layer.silent],
        ),
        Issue(
            "gradient",
            "Gradient is zero",
            "The score does not depend on what these layers put out, at least not at this input.",
            [(i, "zero everywhere") for i, layer in own if _flat_gradient(layer)],
        ),
        Issue(
            "dead",
            "Dead channels",
            "Zero at every position of this input, a tenth of the channels or more. One input proves little: look at a "
            "batch before pruning.",
            sorted(_dead(layers, own), key=lambda item: -_share(layers[item[0]])),
        ),
        Issue(
            "constant",
            "Constant output",
            "Every value is the same, so the layer passes nothing on about the input.",
            [(i, f"all {digits(v.min)}") for i, layer in own for v in _values(layer)[:1] if _is_constant(v)],
        ),
    ]
    return [kind for kind in kinds if kind.layers]


def _values(layer: LayerFacts) -> list[Numbers]:
    return [call.value for call in layer.calls if call.value is not None]


def _first(layer: LayerFacts) -> float:
    """When its output was first not finite; gradients are what comes of that, or come after."""
    return min((c.order for c in layer.calls if c.value and (c.value.nans or c.value.infs)), default=float("inf"))


def _not_finite(layer: LayerFacts) -> str:
    return ", ".join(
        f"{' and '.join(parts)} in its {what}"
        for what, found in (("output", _values(layer)), ("gradient", [c.gradient for c in layer.calls if c.gradient]))
        if (parts := _counts(found))
    )


def _counts(found: list[Numbers]) -> list[str]:
    sums = {"NaN": sum(n.nans for n in found), "Inf": sum(n.infs for n in found)}
    return [f"{number:,} {what}" for what, number in sums.items() if number]


def _dead(layers: list[LayerFacts], own: list[tuple[int, LayerFacts]]) -> Iterator[tuple[int, str]]:
    said: dict[int, set[str]] = {}
    # From the last, since what a layer holds comes after it: a block that only passes on what its ReLU made dead is no
    # finding of its own.
    for i, layer in reversed(own):
        worst = max(_values(layer), key=_dead_share, default=None)
        note = "" if worst is None or _dead_share(worst) < _DEAD else f"{worst.dead:,} of {worst.channels:,}"
        if note and note not in said.get(i, ()):
            yield i, note
        if layer.parent >= 0:
            said.setdefault(layer.parent, set()).update(said.get(i, set()) | {note})


def _dead_share(found: Numbers) -> float:
    return found.dead / found.channels if found.channels else 0.0


def _share(layer: LayerFacts) -> float:
    return max(map(_dead_share, _values(layer)), default=0.0)


def _flat_gradient(layer: LayerFacts) -> bool:
    found = [call.gradient for call in layer.calls if call.gradient is not None]
    # The least and greatest are of finite values only, so that a gradient of zeros and NaN has both at zero.
    # A module that is called twice is fine if one of its calls matters.
    return bool(found) and all(g.min == g.max == 0 and not g.nans and not g.infs for g in found)


def _is_constant(found: Numbers) -> bool:
    # One number is always the same as itself.
    return found.elements > 1 and found.min == found.max and not found.nans and not found.infs
