"""Models that return features: ``FeatureLayer``, ``FeatureLayers``, ``FeatureExtractor`` and ``get_layer_candidates``.

A session for each call, or, with ``attach=True``, plain hooks that stay on the model and are compiled with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchhook._core import hooks, taps
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.select import Target, resolve
from torchhook._core.session import Session
from torchhook._layers import layers
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook.errors import SelectorError, suggestion


class Features(list[Any]):
    """Feature values in the order of the paths; also read by path: ``features["features.6"]``."""

    def __init__(self, named: list[tuple[str, Any]]) -> None:
        super().__init__(value for _, value in named)
        self._named = dict(named)
        self._paths = [path for path, _ in named]

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._named:
            raise SelectorError(f"no feature {key!r} here. {suggestion(key, self._named)}")
        return self._named[key]

    def keys(self) -> list[str]:
        return list(self._named)

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._named.items())


tree.register(Features, lambda f: (list(f), f._paths), lambda new, paths: Features(list(zip(paths, new, strict=True))))


class _Attached:
    """Hooks that stay on a model, and what they keep while their wrapper runs; plain calls of the model keep nothing.

    The wrapper owns this object and its hooks know it, so that the wrapper can go while the model stays.
    """

    def __init__(self, targets: list[tuple[str, Target]], attachment: hooks.Attachment) -> None:
        self.running = False
        self.paths = [path for path, _ in targets]
        self.values: dict[str, list[Any]] = {path: [] for path in self.paths}
        for path, target in dict(targets).items():
            attachment.attach(_AttachedTap(path, self), target.module)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Any]], Any]:
        features = {}
        self.running = True
        try:
            output = model(*args, **kwargs)
            for path, kept in self.values.items():
                if len(kept) != 1:
                    raise LookupError(f"{path!r} ran {len(kept)} times; attach=True takes layers that run once.")
                features[path] = kept[0]
        finally:
            self.running = False
            for kept in self.values.values():
                kept.clear()
        return [(path, features[path]) for path in self.paths], output


class _AttachedTap(taps.StaticTap):
    __slots__ = ("attached",)

    def __init__(self, path: str, attached: _Attached) -> None:
        super().__init__(path, attached.values[path])
        self.attached = attached

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.attached.running:
            super().__call__(module, args, output)


class _Featured(nn.Module):
    """A model together with layers whose outputs are wanted.

    Hooks are there only while ``forward`` runs. With ``attach=True``, which takes the outputs of layers that run once,
    they stay for as long as this object does. That is what ``torch.compile`` and ``torch.export`` need: they capture
    model and hooks as one graph.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str], attach: bool = False) -> None:
        super().__init__()
        self.model = model
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        targets = self._targets()  # a wrong path is said now, not at the first call
        self._attached = self._attach(targets) if attach else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._attached is not None:  # a copy: the hooks of the original are not its own
            self._attached = self._attach(self._targets())

    def _attach(self, targets: list[tuple[str, Target]]) -> _Attached:
        for path, target in targets:
            if target.tensor is not None or target.site != Site(target.site.path):
                raise SelectorError(
                    f"{path!r}: attach=True takes the outputs of layers, by plain paths ('layer4') or globs of them; "
                    "inputs, gradients, parameters, operations and single calls need attach=False."
                )
        attachment = hooks.Attachment()
        weakref.finalize(self, attachment.remove)
        return _Attached(targets, attachment)

    def _targets(self) -> list[tuple[str, Target]]:
        index = Index(self.model)
        chosen = [(path, resolve(index, path)) for path in self.paths]
        return [(str(t.site) if len(found) > 1 else path, t) for path, found in chosen for t in found]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Any]], Any]:
        if self._attached is not None:
            return self._attached.run(self.model, args, kwargs)
        targets = self._targets()
        session = Session(self.model)
        session.record({target.site: target for _, target in targets}.values(), Keep("live"))
        with session as recording:
            output = self.model(*args, **kwargs)
        return [(path, recording[target.site]) for path, target in targets], output


class FeatureLayers(_Featured):
    """A model that returns the outputs of chosen layers beside its own: ``features, output = hooked(x)``.

    >>> import torch
    >>> hooked = FeatureLayers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)), ["0"])
    >>> features, output = hooked(torch.ones(1, 2))
    >>> features["0"].shape, features[0].requires_grad
    (torch.Size([1, 3]), True)

    Values stay on the autograd graph and are what the layer produced, even where the next one works in place.
    """

    def __init__(self, model: nn.Module, feature_layer_paths: Iterable[str], *, attach: bool = False) -> None:
        super().__init__(model, feature_layer_paths, attach)
        self.feature_layer_paths = self.paths

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Features, Any]:
        named, output = self._run(args, kwargs)
        return Features(named), output


class FeatureLayer(_Featured):
    """A model that returns the output of one layer beside its own: ``feature, output = hooked(x)``."""

    def __init__(self, model: nn.Module, feature_layer_path: str, *, attach: bool = False) -> None:
        super().__init__(model, [feature_layer_path], attach)
        if len(self._targets()) > 1:
            raise SelectorError(f"{feature_layer_path!r} chooses several layers; FeatureLayers takes those.")
        self.feature_layer_path = feature_layer_path

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        named, output = self._run(args, kwargs)
        return named[0][1], output


class FeatureExtractor(_Featured):
    """A model whose output is a dict of the outputs of chosen layers."""

    def __init__(self, model: nn.Module, layer_names: Iterable[str], *, attach: bool = False) -> None:
        super().__init__(model, layer_names, attach)
        self.layer_names = self.paths

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._run(args, kwargs)[0])


def get_layer_candidates(model: nn.Module, max_depth: int = 1) -> Iterator[str]:
    """The paths of a model's layers, down to ``max_depth`` levels.

    >>> list(get_layer_candidates(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    ['0', '1']
    """
    return (layer.name for layer in layers(model, depth=max_depth) if layer.name)
