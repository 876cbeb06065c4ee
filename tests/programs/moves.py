"""What a drawn program can do with a value, as text: layers, views, functions, and writes in place."""

from __future__ import annotations

import random
from typing import NamedTuple

Shape = tuple[int, ...]


class Move(NamedTuple):
    """A step, with ``{h}`` for the value, ``{g}`` for another of the same shape, ``{c}`` for a number."""

    text: str
    shape: Shape


class Layer(NamedTuple):
    text: str
    gives: dict[str, Shape]
    """Shapes of the tensors in the output, by how to reach them in it: ``""``, ``"[0]"``, ``"['a']"``."""
    keyword: str = "input"


def layer(dice: random.Random, shape: Shape) -> Layer:
    """A module of torch's own for a value."""
    same, last, out = {"": shape}, shape[-1], dice.choice([2, 3, 4, shape[-1]])
    inplace = dice.choice(["", "inplace=True"])
    linear = Layer(f"nn.Linear({last}, {out})", {"": (*shape[:-1], out)})
    found = [
        *[linear] * 4,
        Layer(f"nn.Sequential(nn.Linear({last}, {out}), nn.ReLU({inplace}))", {"": (*shape[:-1], out)}),
        Layer(
            f"nn.Sequential(nn.Linear({last}, {last}), nn.Sequential(nn.Dropout(0.5, {inplace}), nn.Identity()))", same
        ),
        *[Layer(f"nn.ReLU({inplace})", same)] * 3,
        *[Layer(f"nn.SiLU({inplace})", same)] * 2,
        Layer(f"nn.LeakyReLU(0.1, {inplace})", same),
        Layer(f"nn.ELU({inplace})", same),
        Layer(f"nn.Dropout(0.5, {inplace})", same),
        *[Layer("nn.Identity()", same)] * 2,
        Layer("nn.Sequential()", same),
        Layer("nn.Tanh()", same),
        Layer("nn.Softmax(-1)", same),
        Layer(f"nn.LayerNorm({last})", same),
    ]
    if len(shape) in (2, 3):
        channels = shape[-2]
        found += [Layer(f"nn.Conv1d({channels}, {out}, 3, padding=1)", {"": (*shape[:-2], out, last)})] * 2
        found.append(Layer("nn.Flatten(0, 1)", {"": (shape[0] * shape[1], *shape[2:])}))
    if len(shape) == 3:
        hidden = dice.choice([2, 3])
        gives = {"[0]": (*shape[:2], hidden), "[1]": (1, shape[0], hidden)}
        found += [
            Layer(f"nn.GRU({last}, {hidden}, batch_first=True)", gives),
            Layer(f"nn.BatchNorm1d({shape[1]})", same),
            Layer("nn.Flatten()", {"": (shape[0], shape[1] * last)}),
            Layer(f"nn.Unflatten(1, ({shape[1]}, 1))", {"": (shape[0], shape[1], 1, last)}),
        ]
    return dice.choice(found)


def views(shape: Shape) -> list[Move]:
    """Ways to look at the same memory, or at most of them: a reshape may copy."""
    last, dims = shape[-1], len(shape)
    found = [Move("{h}.view_as({h})", shape), Move("{h}.unsqueeze(0)", (1, *shape)), Move("{h}[...]", shape)]
    if last > 1:
        found += [Move("{h}[..., 1:]", (*shape[:-1], last - 1)), Move("{h}.narrow(-1, 0, 1)", (*shape[:-1], 1))]
    if last == 4:
        found += [Move(f"{{h}}.chunk(2, -1)[{i}]", (*shape[:-1], 2)) for i in (0, 1)]
        found += [Move("{h}[..., ::2]", (*shape[:-1], 2)), Move("{h}.split([1, 3], -1)[1]", (*shape[:-1], 3))]
    if last == 1:
        found.append(Move("{h}.expand(" + "-1, " * (dims - 1) + "2)", (*shape[:-1], 2)))
    if dims > 1:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        found += [Move("{h}.transpose(-1, -2)", swapped)] * 2
        found += [Move("{h}[0]", shape[1:]), Move("{h}.unbind(0)[-1]", shape[1:])]
        found += [Move("{h}.flatten(0, 1)", (shape[0] * shape[1], *shape[2:]))]
        found += [Move(f"{{h}}.reshape(-1, {shape[-2]})", (_size(shape) // shape[-2], shape[-2]))]
        found += [
            Move(f"{{h}}.view({shape[1]}, {shape[0]}, {'-1, ' * (dims > 2)})", (shape[1], shape[0], *_rest(shape)))
        ]
    if dims == 2:
        found.append(Move("{h}.unsqueeze(0).expand(2, -1, -1)", (2, *shape)))
        found.append(Move("{h}.mT", (shape[1], shape[0])))
    if dims == 3:
        found.append(Move("{h}.permute(1, 0, 2)", (shape[1], shape[0], last)))
    if shape[0] == 1 and dims > 1:
        found.append(Move("{h}.squeeze(0)", shape[1:]))
    return found


def several(shape: Shape) -> list[tuple[str, list[Shape]]]:
    """Views that come together."""
    found = []
    if shape[-1] == 4:
        found += [
            ("{h}.chunk(2, -1)", [(*shape[:-1], 2)] * 2),
            ("{h}.split([1, 3], -1)", [(*shape[:-1], 1), (*shape[:-1], 3)]),
        ]
    if shape[0] == 2 and len(shape) > 1:
        found.append(("{h}.unbind(0)", [shape[1:]] * 2))
    return found


def functions(shape: Shape) -> list[Move]:
    """Functions that make a new value."""
    same = [
        *["{h} + {g}", "{h} * {g}", "{h} - {g}", "{h} * {c}", "{h} + {c}", "{h}.sin()", "{h}.tanh()", "{h}.sigmoid()"],
        *["F.relu({h})", "F.silu({h})", "F.softmax({h}, -1)", "{h} - {h}.mean(-1, keepdim=True)", "{h}.flip(-1)"],
        *["{h} * detach({h}).sigmoid()", "torch.where({h} > 0, {h}, {g})", "{h}.clone()", "{h}.contiguous()"],
        *["F.layer_norm({h}, {h}.shape[-1:])", "{h}.clamp(-0.9, 0.8)", "{h} + {h}.mean()", "{h} * {h}.mean(0)"],
        *["{h} + {h}", "{h}.cumsum(-1)", "F.dropout({h}, 0.5, False)", "{h}.masked_fill({h} > 0.4, 0.2)"],
    ]
    found = [Move(text, shape) for text in same]
    found.append(Move("{h}.sum(-1, keepdim=True)", (*shape[:-1], 1)))
    if len(shape) > 1:
        found.append(Move("{h}.mean(0)", shape[1:]))
        found.append(Move("torch.cat([{h}, {g}], -1)", (*shape[:-1], 2 * shape[-1])))
        found.append(Move("{h} @ {g}.transpose(-1, -2)", (*shape[:-1], shape[-2])))
    return found


def writes(shape: Shape) -> list[str]:
    """Writes in place."""
    found = [
        *["{h} += {g}", "{h} *= {c}", "{h} -= {c}", "{h}.mul_({g})", "{h}.add_({g})", "{h}.copy_({g})", "{h}.zero_()"],
        *["{h}.clamp_(-0.7, 0.6)", "{h}.masked_fill_({h} > 0.3, 0.1)", "F.relu({h}, inplace=True)", "{h}.sin_()"],
        *["F.silu({h}, inplace=True)", "{h}.tanh_()", "{h}.sigmoid_()", "{h} -= {h}.mean(-1, keepdim=True)"],
        *["{h} += {h}.sin()", "{h} *= {h}.sigmoid()", "{h}[..., 0] = {g}[..., 0]", "{h}[..., :1] *= {c}"],
        *["{h}[..., 0].mul_({c})", "{h}.add_({g}, alpha=0.5)", "{h}[:1] += {c}", "{h}.addcmul_({g}, {g})"],
        *["{h}.view_as({h}).mul_({c})", "{h}.leaky_relu_(0.1)", "{h}.lerp_({g}, 0.4)", "{h}.fill_({c})"],
    ]
    found = [text.replace("{h}.leaky_relu_(", "F.leaky_relu_({h}, ") for text in found]
    if shape[-1] > 1:
        found += [
            "{h}[..., 1:] *= {c}",
            "{h}[..., 1:].sin_()",
            "{h}[..., 1:] = {g}[..., :-1] * 0.7",
            "{h}[..., 1:] += {g}[..., :-1].sin()",
        ]
    if len(shape) > 1:
        found += ["{h}.transpose(-1, -2).mul_({c})", "{h}[0].tanh_()", "{h}.unbind(0)[0].mul_({c})"]
    return found


def _size(shape: Shape) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _rest(shape: Shape) -> Shape:
    return (_size(shape) // (shape[0] * shape[1]),) if len(shape) > 2 else ()
