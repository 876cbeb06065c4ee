"""The ways to get at values: bare hooks, TorchHook, and its peers, each as its documentation says.

A way has up to three modes. Each makes a function that calls the model once and returns what was found, by name; the
model is a copy of its own, so that what a peer leaves on it disturbs nobody. Modes that a peer lacks are absent.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from bare import Bare, leaves
from models import Logits, Work, gpt2_config, import_torchvision, import_transformers
from torch import Tensor, nn

Found = dict[str, list[Any]]
Run = Callable[[], Found]
Make = Callable[[Work, list[str]], Run]


class NotOffered(Exception):
    """The peer has nothing for this model or these sites, and says so itself or in its documentation."""


def loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def singly(values: dict[str, Any]) -> Found:
    return {name: [value] for name, value in values.items()}


def by_autograd(values: dict[str, Any], output: Tensor) -> Found:
    """What one does with features that are still on the graph: ``retain_grad``, then ``backward``."""
    kept = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.requires_grad}
    for value in kept.values():
        value.retain_grad()
    loss(output).backward()
    return singly({name: value.grad for name, value in kept.items() if value.grad is not None})


# -- bare hooks ----------------------------------------------------------------------------------------------------


def bare_per_call(work: Work, names: list[str]) -> Run:
    def run() -> Found:
        with Bare(work.model, names) as bare:
            work.model(*work.args)
        return bare.store

    return run


def bare_held(work: Work, names: list[str]) -> Run:
    bare = Bare(work.model, names)

    def run() -> Found:
        for calls in bare.store.values():
            calls.clear()
        work.model(*work.args)
        return bare.store

    return run


def bare_gradients(work: Work, names: list[str]) -> Run:
    """Hooks on tensors, put on while each still is what the layer returned (pytorch#61519)."""

    def run() -> Found:
        found: Found = {name: [] for name in names}
        handles = []
        for name in names:
            calls = found[name]

            def hook(module: nn.Module, args: Any, output: Tensor, calls: list[Any] = calls) -> None:
                place = len(calls)
                calls.append(None)
                output.register_hook(lambda grad: calls.__setitem__(place, grad.clone()))

            handles.append(work.model.get_submodule(name).register_forward_hook(hook))
        loss(work.model(*work.args)).backward()
        for handle in handles:
            handle.remove()
        return {name: [value for value in calls if value is not None] for name, calls in found.items()}

    return run


# -- TorchHook -----------------------------------------------------------------------------------------------------


def ours_per_call(work: Work, names: list[str]) -> Run:
    import torchhook as th

    def run() -> Found:
        with th.capture(work.model, names) as rec:
            work.model(*work.args)
        return Lazily(rec.all)

    return run


def ours_held(work: Work, names: list[str]) -> Run:
    import torchhook as th

    session = th.capture(work.model, names).open()

    def run() -> Found:
        session.recording.clear()
        work.model(*work.args)
        return Lazily(session.recording.all)

    return run


def ours_gradients(work: Work, names: list[str]) -> Run:
    import torchhook as th

    sites = [f"{name}:grad" for name in names]

    def run() -> Found:
        with th.capture(work.model, sites) as rec:
            loss(work.model(*work.args)).backward()
        return Lazily(lambda name: rec.all(f"{name}:grad"))

    return run


class Lazily(dict[str, list[Any]]):
    """Read when it is judged: reading is no part of what is timed, for no way."""

    def __init__(self, read: Callable[[str], list[Any]]) -> None:
        super().__init__()
        self._read = read

    def get(self, name: str, default: Any = None) -> Any:
        return self._read(name)


# -- TorchHook 0.2.7, which has the same import name ------------------------------------------------------------------


def old_torchhook() -> ModuleType:
    """The package of PyPI, from its own folder under another name: see ``peers.txt``."""
    folder = os.environ.get("TORCHHOOK_027", str(Path(sys.prefix) / "torchhook-0.2.7"))
    path = Path(folder) / "torchhook" / "__init__.py"
    if not path.exists():
        raise ImportError(f"no TorchHook 0.2.7 in {folder}: pip install --no-deps --target {folder} torchhook==0.2.7")
    spec = importlib.util.spec_from_file_location("torchhook_027", path, submodule_search_locations=[str(path.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchhook_027"] = module
    spec.loader.exec_module(module)
    return module


def old_per_call(work: Work, names: list[str]) -> Run:
    manager_of = old_torchhook().HookManager

    def run() -> Found:
        manager = manager_of(work.model)
        for name in names:
            manager.add(name)
        work.model(*work.args)
        found = {name: list(manager.get_features(name)) for name in names}
        manager.clear_hooks()
        return found

    return run


def old_held(work: Work, names: list[str]) -> Run:
    manager = old_torchhook().HookManager(work.model)
    for name in names:
        manager.add(name)

    def run() -> Found:
        manager.clear_features()
        work.model(*work.args)
        return manager.get_all()

    return run


# -- torch-featurelayer, torchvision, timm ----------------------------------------------------------------------------


def featurelayer(work: Work, names: list[str]) -> Run:
    from torch_featurelayer import FeatureLayers

    hooked = FeatureLayers(work.model, names)
    return lambda: singly(hooked(*work.args)[0])


def featurelayer_gradients(work: Work, names: list[str]) -> Run:
    from torch_featurelayer import FeatureLayers

    hooked = FeatureLayers(work.model, names)
    return lambda: by_autograd(*hooked(*work.args))


def fx_held(work: Work, names: list[str]) -> Run:
    import_torchvision()
    from torchvision.models.feature_extraction import create_feature_extractor

    extractor = create_feature_extractor(work.model, return_nodes={name: name for name in names}).eval()
    return lambda: singly(extractor(*work.args))


def fx_gradients(work: Work, names: list[str]) -> Run:
    import_torchvision()
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    # The output itself too, for a loss; its node is the last one.
    last = get_graph_node_names(work.model)[1][-1]
    nodes = {name: name for name in names} | {last: "(output)"}
    extractor = create_feature_extractor(work.model, return_nodes=nodes).eval()

    def run() -> Found:
        values = extractor(*work.args)
        output = values.pop("(output)")
        if last in names:
            values[last] = output
        return by_autograd(values, output)

    return run


def timm_held(work: Work, names: list[str]) -> Run:
    if not hasattr(work.model, "forward_intermediates"):
        raise NotOffered("for models of timm")
    places = [name.split(".")[1] for name in names if name.startswith("blocks.") and name.count(".") == 1]
    if not places:
        raise NotOffered("for blocks only")

    def run() -> Found:
        values = work.model.forward_intermediates(
            *work.args,
            indices=[int(place) for place in places],
            return_prefix_tokens=True,
            intermediates_only=True,
            output_fmt="NLC",
        )
        # It gives patches and prefix tokens apart.
        joined = [torch.cat([prefix, patches], 1) for patches, prefix in values]
        return singly({f"blocks.{place}": value for place, value in zip(places, joined, strict=True)})

    return run


# -- captum, nnsight, TransformerLens, torchlens ----------------------------------------------------------------------


def captum_per_call(work: Work, names: list[str]) -> Run:
    from captum.attr import LayerActivation

    layers = [work.model.get_submodule(name) for name in names]

    def run() -> Found:
        values = LayerActivation(work.model, layers).attribute(*work.args)
        return singly(dict(zip(names, values, strict=True)))

    return run


def captum_gradients(work: Work, names: list[str]) -> Run:
    from captum._utils.gradient import compute_layer_gradients_and_eval

    layers = [work.model.get_submodule(name) for name in names]

    def scalar(*args: Any) -> Tensor:
        return loss(work.model(*args)).reshape(1)

    def run() -> Found:
        gradients, _ = compute_layer_gradients_and_eval(scalar, layers, work.args)
        return singly({name: leaves(value)[0] for name, value in zip(names, gradients, strict=True)})

    return run


def _part(root: Any, name: str) -> Any:
    for word in name.split("."):
        root = root[int(word)] if word.isdigit() else getattr(root, word)
    return root


def nnsight_per_call(work: Work, names: list[str]) -> Run:
    from nnsight import NNsight

    model = NNsight(work.model)

    def run() -> Found:
        found: dict[str, Any] = {}
        with model.trace(*work.args):
            for name in names:
                found[name] = _part(model, name).output.save()
        return singly(found)

    return run


def nnsight_gradients(work: Work, names: list[str]) -> Run:
    from nnsight import NNsight

    model = NNsight(work.model)

    def run() -> Found:
        found: dict[str, Any] = {}
        with model.trace(*work.args):
            outputs = {}
            for name in names:
                outputs[name] = _part(model, name).output
            total = model.output.float().square().mean()
            with total.backward():
                # A block often returns the very tensor of its last layer, whose gradient is asked for once.
                of: dict[int, Any] = {}
                for name in reversed(names):
                    if id(outputs[name]) not in of:
                        of[id(outputs[name])] = outputs[name].grad.save()
                    found[name] = of[id(outputs[name])]
        return singly(found)

    return run


class LensWork(Work):
    """Its values are those of its hook points."""

    @property
    def all(self) -> list[str]:
        return [name for name in super().all if name in self.model.hook_dict]


def lens_work() -> Work:
    """TransformerLens has its own names, and so a piece of work of its own: the same GPT-2, in its bridge."""
    transformers = import_transformers()
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens import TransformerBridge

    model = transformers.GPT2LMHeadModel(gpt2_config()).eval()
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(2000)}, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w1", "pad_token": "w2"}
    with tempfile.TemporaryDirectory() as folder:  # it reads its tokenizer again, from where it came
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=tokenizer)
    few = [f"blocks.{n}.mlp.hook_out" for n in (0, 2, 4, 5)]
    return LensWork("GPT-2, 6 blocks", bridge, (torch.randint(0, 2000, (2, 32)),), "blocks.3.mlp.hook_out", few)


def lens_per_call(work: Work, names: list[str]) -> Run:
    if isinstance(work.model, Logits) or not hasattr(work.model, "run_with_cache"):
        raise NotOffered("for language models that it knows")

    def run() -> Found:
        cache = work.model.run_with_cache(*work.args, names_filter=names)[1]
        return Lazily(lambda name: [_heads_side_by_side(name, cache[name])] if name in cache else [])

    return run


def _heads_side_by_side(name: str, value: Tensor) -> Tensor:
    """It shows queries, keys, values and what goes into the projection by head: the same numbers in another layout."""
    return value.flatten(2) if name.endswith(("q.hook_out", "k.hook_out", "v.hook_out", "o.hook_in")) else value


def torchlens_per_call(work: Work, names: list[str]) -> Run:
    import torchlens

    often = {name for name, calls in bare_per_call(own_copy(work), names)().items() if len(calls) > 1}
    # What the last module returns is the model's output there, and has no other name.
    last = [name for name, _ in work.model.named_modules()][-1]
    wanted = {name: f"{name}:1" if name in often else name for name in names if name != last}
    return lambda: singly(torchlens.extract(work.model, *work.args, wanted))


WAYS: dict[str, dict[str, Make]] = {
    "bare hooks, clone": {"per call": bare_per_call, "held": bare_held, "gradients": bare_gradients},
    "torchhook": {"per call": ours_per_call, "held": ours_held, "gradients": ours_gradients},
    "TorchHook 0.2.7": {"per call": old_per_call, "held": old_held},
    "torch-featurelayer": {"per call": featurelayer, "gradients": featurelayer_gradients},
    "torchvision fx": {"held": fx_held, "gradients": fx_gradients},
    "timm forward_intermediates": {"held": timm_held},
    "captum LayerActivation": {"per call": captum_per_call, "gradients": captum_gradients},
    "nnsight": {"per call": nnsight_per_call, "gradients": nnsight_gradients},
    "TransformerLens": {"per call": lens_per_call},
    "torchlens": {"per call": torchlens_per_call},
}


def own_copy(work: Work) -> Work:
    return work._replace(model=copy.deepcopy(work.model))
