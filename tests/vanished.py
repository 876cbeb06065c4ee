"""A process in which some private names of torch have vanished: ``python tests/vanished.py SCENARIO NAME …``.

It prints ``right``, or the message of the one clear error; anything else is a failure. Oracles are written out here
with bare PyTorch: what is right does not depend on the library.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class _Gone:
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AttributeError("gone")


class _Engine:
    """As autograd's, without what is private to it."""

    def __init__(self, engine: Any) -> None:
        self.run_backward = engine.run_backward


def vanish(path: str) -> Callable[[], None]:
    """Take a name away, and return how to give it back: torch itself may need it to go on."""
    *parents, name = path.split(".")
    owner: Any = sys.modules["torch"]
    for parent in parents[1:]:
        owner = getattr(owner, parent)
    was = getattr(owner, name)
    if path.endswith("_execution_engine"):
        owner._execution_engine = _Engine(was)
    elif isinstance(owner, type):
        setattr(owner, name, _Gone())
    else:
        delattr(owner, name)
        if path not in STAYS_AWAY:
            return lambda: setattr(owner, name, was)
    return lambda: None


STAYS_AWAY = {"torch.multiprocessing.reductions.StorageWeakRef"}  # which is looked up when it is needed


def captured() -> None:
    import torchhook as th

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Flatten(0), nn.Identity())
    x, seen = torch.randn(2, 3), {}
    for i, module in enumerate(model):
        module.register_forward_hook(lambda m, a, out, i=i: seen.update({str(i): out.clone()}))
    with th.capture(model, "*") as rec:
        model(x)
    assert all(torch.equal(rec[name], value) for name, value in seen.items())


def in_vmap() -> None:
    import torchhook as th

    model, x = nn.Linear(3, 4), torch.randn(5, 2, 3)
    with th.capture(model, "") as rec:
        torch.func.vmap(model)(x)
    assert torch.allclose(rec[""], model(x))


class Net(nn.Module):
    """Reads a view and overwrites it, passes things on, and uses what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.same, self.relu = nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before = h.flip(-1) * 7
        return self.relu(self.same(h)) * 2 + before


def gradients() -> None:
    import torchhook as th

    model, x = Net(), torch.randn(2, 2, 3)
    relu = 2 * (model.a(x).detach() > 0).float()
    with th.capture(model, "a:grad", "same:grad", "relu:grad_input", "relu:grad") as rec:
        model(x).sum().backward()
    for site, expected in {"a:grad": relu + 7, "same:grad": relu, "relu:grad_input": relu}.items():
        assert torch.allclose(rec[site], expected), site
    assert torch.allclose(rec["relu:grad"], torch.full_like(relu, 2))


def nested_gradients() -> None:
    import torchhook as th

    lstm, x = nn.LSTM(3, 4), torch.randn(5, 1, 3)
    with th.capture(lstm, ":grad") as rec:
        out, (h, _) = lstm(x)
        (out.sum() * 2 + h.sum() * 3).backward()
    got = rec[":grad"]
    assert torch.equal(got[0], torch.full_like(got[0], 2))
    assert torch.equal(got[1][0], torch.full_like(got[1][0], 3))


class Recomputed(nn.Module):
    """One layer, run three times, each time checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant).tanh()
        return x


def checkpointed(understood: bool = True) -> None:
    import torchhook as th
    from torchhook._torch import checkpoints

    if not understood:  # torch needs these itself, so that they cannot be taken away
        checkpoints._kinds = lambda: ((), ())
    for reentrant in (False, True):
        model, x = Recomputed(reentrant), torch.randn(2, 3, requires_grad=True)

        def scaled(value: Tensor, site: Any) -> Tensor:
            return value * (site.call + 1)

        y = x
        for k in range(3):
            y = (model.layer(y) * (k + 1)).tanh()
        expected = torch.autograd.grad(y.sum(), [x, model.layer.weight])
        with th.edit(model, {"layer": scaled}):
            found = torch.autograd.grad(model(x).sum(), [x, model.layer.weight]) if not reentrant else None
            if found is None:
                model(x).sum().backward()
                found = (x.grad, model.layer.weight.grad)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))


def selective() -> None:
    import torchhook as th

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x, projection = torch.randn(2, 3), torch.randn(3, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            return checkpoint(layers, x, use_reentrant=False, context_fn=contexts)

    for layer in (layers[0], layers[2], layers[4]):
        layer.bias = None
    expected = torch.autograd.grad(layers(x).pow(2).sum(), layers[0].weight)[0]
    with th.capture(net := Net(), "layers.0", transform=lambda value: value @ projection):
        found = torch.autograd.grad(net(x).pow(2).sum(), layers[0].weight)[0]
    assert torch.allclose(found, expected)


def guarded() -> None:
    import torchhook as th

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty_like(x).copy_(x).log()

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Log())
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with contextlib.suppress(th.errors.GuardError), th.guard(model) as g:
        model(torch.ones(1, 3))
    assert [str(f.site) for f in g.findings] == ["2/log#0"], g.findings
    square = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with contextlib.suppress(th.errors.GuardError), th.guard(square) as g:
        (square(torch.zeros(1, 3)) * 0).sqrt().sum().backward()
    assert [finding.phase for finding in g.findings] == ["backward"]


def attended() -> None:
    from torch.nn.attention.bias import causal_lower_right

    import torchhook as th

    class Attends(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4, 4))

    q = torch.randn(1, 2, 4, 8)
    scores = (q @ q.mT / 8**0.5).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(th.attention(Attends(), q)[""], scores.softmax(-1), atol=1e-6)


def saved() -> None:
    import torchhook as th

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            sparse = torch.eye(3).to_sparse()
            scales, zeros = torch.full((2,), 0.1), torch.zeros(2, dtype=torch.long)
            channels = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
            tensors = {"q": torch.quantize_per_tensor(x, 0.1, 3, torch.quint8), "c": channels, "s": sparse}
            return {**tensors, "l": [x, (x, None)]}

    with th.capture(Makes(), "") as rec:
        pass
    model = Makes()
    with th.capture(model, "") as rec:
        model(torch.ones(2))
    with tempfile.TemporaryDirectory() as folder:
        read = th.load(rec.save(Path(folder) / "r.safetensors"))[""]
    assert all(torch.equal(read[name].dequantize(), torch.ones(2)) for name in "qc")
    assert torch.equal(read["s"].to_dense(), torch.eye(3))
    assert torch.equal(read["l"][1][0], torch.ones(2))


def heard() -> None:
    import torchhook as th

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x) * 2

    with th.capture(model := Doubles(), "/mul", "/relu") as rec:
        model(torch.tensor([-1.0, 3.0]))
    assert rec["/mul"].tolist() == [0.0, 6.0]
    assert rec["/relu"].tolist() == [0.0, 3.0]


def watched() -> None:
    import torchhook as th
    from torchhook._torch import foreach
    from torchhook._watch import weights

    # As on a GPU, where all weights are taken together.
    weights._goes_together = lambda tensor: True
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before: dict[str, Tensor] = {}
    with th.watch(model) as w:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data.add_(0.5 * torch.randn_like(parameter))
    for name, parameter in model.named_parameters():
        size, moved = before[name].norm().item(), (parameter.detach() - before[name]).norm().item()
        assert abs(w.last[name]["norm"] - size) < 1e-5 * size
        assert abs(w.last[name]["update_ratio"] - moved / size) < 1e-5 * moved / size
    assert [float(norm) for norm in foreach.norms([torch.tensor([3.0, 4.0]), torch.ones(4)])] == [5.0, 2.0]


SCENARIOS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        captured,
        in_vmap,
        gradients,
        nested_gradients,
        checkpointed,
        selective,
        guarded,
        attended,
        saved,
        heard,
        watched,
    )
}
SCENARIOS["not_understood"] = lambda: checkpointed(understood=False)


if __name__ == "__main__":
    scenario, *names = sys.argv[1:]
    import torch.multiprocessing.reductions
    import torch.nn.attention.bias

    torch.manual_seed(0)
    back = [vanish(name) for name in names]
    import torchhook

    for restore in back:
        restore()
    try:
        SCENARIOS[scenario]()
    except torchhook.errors.TorchHookError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("right")
