"""Models that return features: ``FeatureLayer``, ``FeatureLayers``, ``FeatureExtractor`` and ``get_layer_candidates``.

A session for each call, or, with ``attach=True``, plain hooks that stay on the model and are compiled with it.

They are called as those of torch-featurelayer are, and differ from them on purpose where silence would be unsafe:

- a path that is not in the model is an error when the wrapper is made, and not a ``None`` at each call;
- so is, at the call, a layer that did not run (with the likely cause) or that ran several times (with the calls);
- a value is what its layer produced, also where the next layer overwrites it;
- nothing stays behind after a call: no hook if the model raised, and no feature on the wrapper, which would keep the
  graph alive; there is no ``feature_layer_output``;
- several features are a list in the order of the paths, read by path as a dict is; iterating gives the values;
- errors are of the same kinds (``AssertionError``, ``AttributeError``), and say more: what was found, what is close.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torchhook._classic.facade import Facade, check_model
from torchhook._core import hooks, never_ran, taps
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.select import Target, resolve
from torchhook._core.session import Session
from torchhook._layers import layers
from torchhook._recording.address import Site
from torchhook._torch import register_pytree_node
from torchhook.errors import AmbiguousCallError, ArgumentError, NeverRanError, SelectorError, suggestion


class FeatureList(list[Any]):
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

    def __contains__(self, value: object) -> bool:
        # A list would compare the path with every tensor, and say no.
        return value in self._named if isinstance(value, str) else super().__contains__(value)

    def __eq__(self, other: object) -> bool:
        # Callers that knew a dict compare with one; callers that know a list, with that.
        return self._named == other if isinstance(other, Mapping) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def keys(self) -> list[str]:
        return list(self._named)

    def values(self) -> list[Any]:
        return list(self._named.values())

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._named.items())


register_pytree_node(
    FeatureList, lambda f: (list(f), f._paths), lambda new, paths: FeatureList(list(zip(paths, new, strict=True)))
)


class _Attached:
    """Hooks that stay on a model, and what they keep while their wrapper runs; its plain calls keep nothing."""

    # The wrapper owns this object and its hooks know it, so that the wrapper can go while the model stays.

    def __init__(self, targets: list[tuple[str, Target]], attachment: hooks.Attachment) -> None:
        self.running = False
        self.paths = [path for path, _ in targets]
        self.values: dict[str, list[Any]] = {path: [] for path in self.paths}
        for path, target in dict(targets).items():
            attachment.attach(_AttachedTap(path, self), target.module)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, list[Any]], Any]:
        """The model's output, and all that each layer gave meanwhile."""
        self.running = True
        try:
            output = model(*args, **kwargs)
            return {path: list(kept) for path, kept in self.values.items()}, output
        finally:
            self.running = False
            for kept in self.values.values():
                kept.clear()


class _AttachedTap(taps.StaticTap):
    __slots__ = ("attached",)

    def __init__(self, path: str, attached: _Attached) -> None:
        super().__init__(path, attached.values[path])
        self.attached = attached

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # In a call of the model alone, nobody would ever take the values away again.
        if self.attached.running:
            super().__call__(module, args, output)


class _Featured(Facade):
    """A model together with layers whose outputs are wanted."""

    def __init__(self, model: nn.Module, paths: Iterable[str], attach: bool = False) -> None:
        super().__init__(model)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        targets = self._targets()  # a wrong path is said now, not at the first call
        self._attached = self._attach(targets) if attach else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._attached is not None:  # a copy: the hooks of the original are not its own
            self._attached = self._attach(self._targets())

    def _attach(self, targets: list[tuple[str, Target]]) -> _Attached:
        # A compiler follows a hook that puts outputs into a list, and not what else a session does.
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
        # Looked up at each call: a layer may have been replaced since the wrapper was made.
        index = Index(self.model)
        chosen = [(path, resolve(index, path)) for path in self.paths]
        return [(str(t.site) if len(found) > 1 else path, t) for path, found in chosen for t in found]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Any]], Any]:
        if self._attached is not None:
            kept, output = self._attached.run(self.model, args, kwargs)
            for path, values in kept.items():
                # Raised here and not in a hook: the model has run to its end, as it would have without hooks.
                if len(values) != 1:
                    raise self._not_once(path, kept)
            return [(path, kept[path][0]) for path in self._attached.paths], output
        targets = self._targets()
        # By site: a path that was asked for twice is recorded once. Live, because features are there to be trained on.
        session = Session(self.model)
        session.record({target.site: target for _, target in targets}.values(), Keep("live"))
        with session as recording:
            output = self.model(*args, **kwargs)
        for path, target in targets:
            if target.site in recording.missing:
                raise _never_ran(path, target, recording.missing[target.site])
        return [(path, _only(recording.all(target.site), path)) for path, target in targets], output

    def _not_once(self, path: str, kept: dict[str, list[Any]]) -> Exception:
        """The error of a layer that ran never or several times, in the words of a session."""
        if kept[path]:
            return AmbiguousCallError(
                f"{path!r} ran {len(kept[path])} times, and attach=True takes layers that run once. "
                f"Without it, '{path}#0' is the first call."
            )
        # What a session would have counted, so that both ways of hooking give the same cause.
        index, targets, known = Index(self.model), dict(self._targets()), {}
        for other, target in targets.items():
            known[id(target.module)] = tap = taps.Tap(other)
            tap.ran = len(kept[other])
        known[id(index.modules[""])] = model = taps.Tap("")
        model.ran = 1
        tap = taps.Tap(path)
        why = never_ran.cause(targets[path], tap, tap, index, known, Scope(), None)
        return _never_ran(path, targets[path], why)


def _never_ran(path: str, target: Target, why: str) -> NeverRanError:
    held = [repr(f"{target.site.path}.{name}") for name in target.module._modules if target.tensor is None][:2]
    one_by_one = f" Or the model calls what it holds one by one: choose {' or '.join(held)}." if held else ""
    return NeverRanError(f"{path!r} was selected and never ran: {why}{one_by_one}")


def _only(values: list[Any], path: str) -> Any:
    if len(values) > 1:
        raise AmbiguousCallError(f"{path!r} ran {len(values)} times. Say which call: '{path}#0' is the first.")
    return values[0]


class FeatureLayers(_Featured):
    """A model that returns the outputs of chosen layers beside its own: ``features, output = hooked(x)``.

    >>> import torch
    >>> hooked = FeatureLayers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)), ["0"])
    >>> features, output = hooked(torch.ones(1, 2))
    >>> features["0"].shape, features[0].requires_grad
    (torch.Size([1, 3]), True)

    Arguments:
        model: called as it is; values stay on its graph, and are true also where the next layer works in place.
        feature_layer_paths: names of layers, or any address or glob: ``"features.6"``, ``"layer*"``, ``"fc:input"``.
        attach: keep the hooks on the model for as long as this object lives, and not only while it is called. That is
            what ``torch.compile`` and ``torch.export`` need; for the outputs of layers that run once.
    """

    def __init__(self, model: nn.Module, feature_layer_paths: Iterable[str], *, attach: bool = False) -> None:
        """Look the paths up; with ``attach=True``, put the hooks on the model."""
        super().__init__(model, feature_layer_paths, attach)
        self.feature_layer_paths = self.paths

    def forward(self, *args: Any, **kwargs: Any) -> tuple[FeatureList, Any]:
        """Call the model: its features, in the order of the paths and by path, and its output."""
        named, output = self._run(args, kwargs)
        return FeatureList(named), output


class FeatureLayer(_Featured):
    """A model that returns the output of one layer beside its own: ``feature, output = hooked(x)``.

    ``attach=True`` keeps the hook on the model, for ``torch.compile`` and ``torch.export``, as in ``FeatureLayers``.
    """

    def __init__(self, model: nn.Module, feature_layer_path: str, *, attach: bool = False) -> None:
        """Look the path up; with ``attach=True``, put the hook on the model."""
        super().__init__(model, [feature_layer_path], attach)
        if len(self._targets()) > 1:
            raise SelectorError(f"{feature_layer_path!r} chooses several layers; FeatureLayers takes those.")
        self.feature_layer_path = feature_layer_path

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call the model: the feature, and its output."""
        named, output = self._run(args, kwargs)
        return named[0][1], output


class FeatureExtractor(_Featured):
    """A model whose output is a dict of the outputs of chosen layers.

    ``attach=True`` keeps the hooks on the model, for ``torch.compile`` and ``torch.export``, as in ``FeatureLayers``.
    """

    def __init__(self, model: nn.Module, layer_names: Iterable[str], *, attach: bool = False) -> None:
        """Look the names up; with ``attach=True``, put the hooks on the model."""
        super().__init__(model, layer_names, attach)
        self.layer_names = self.paths

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the model: the outputs of the layers, by name."""
        return dict(self._run(args, kwargs)[0])


def get_layer_candidates(model: nn.Module, max_depth: int = 1) -> Iterator[str]:
    """The paths of a model's layers, down to ``max_depth`` levels.

    >>> list(get_layer_candidates(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    ['0', '1']
    """
    # Not in a generator of its own, which would say nothing until the first name is asked for.
    check_model(model)
    if not isinstance(max_depth, int) or max_depth < 0:
        raise ArgumentError(f"max_depth must be a non-negative integer, found {max_depth!r}.")
    return (layer.name for layer in layers(model, depth=max_depth) if layer.name)
