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

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torchhook._classic.facade import check_model
from torchhook._classic.feature_list import FeatureList
from torchhook._classic.featured import Featured, Named
from torchhook._core.index import Index
from torchhook._core.per_site import Transforms
from torchhook._layers.api import layers
from torchhook._torch import compiler
from torchhook.errors import ArgumentError, SelectorError


class FeatureLayers(Featured):
    """A model that returns the outputs of chosen layers beside its own: ``features, output = hooked(x)``.

    >>> import torch
    >>> hooked = FeatureLayers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)), ["0"])
    >>> features, output = hooked(torch.ones(1, 2))
    >>> features["0"].shape, features[0].requires_grad
    (torch.Size([1, 3]), True)

    Args:
        model: called as it is; values stay on its graph, and are true also where the next layer works in place.
        feature_layer_paths: names of layers, or any address or glob: ``"features.6"``, ``"layer*"``, ``"fc:input"``.
        attach: keep the hooks on the model for as long as this object lives, as compilers need.
        transform: changes what is returned of each layer, as in ``th.capture``: one for all, or a mapping by selectors.
        edit: changes values on their way, as ``th.edit`` does.
        caches: ``False`` leaves key-value caches out of the features and the output, and returns plain containers.
    """

    def __init__(
        self,
        model: nn.Module,
        feature_layer_paths: Iterable[str],
        *,
        attach: bool = False,
        transform: Transforms = None,
        edit: Mapping[Any, Any] | None = None,
        caches: bool = True,
    ) -> None:
        """Look the paths up; with ``attach=True``, put the hooks on the model."""
        super().__init__(model, feature_layer_paths, attach=attach, transform=transform, edit=edit, caches=caches)
        self.feature_layer_paths: list[str] = self.paths

    def _result(self, named: Named, output: Any) -> Any:
        # In an exported program a dict: it has the names, and loads where this library is not installed.
        if compiler.is_exporting():
            return dict(named), output
        return FeatureList([value for _, value in named], [path for path, _ in named]), output


class FeatureLayer(Featured):
    """A model that returns the output of one layer beside its own: ``feature, output = hooked(x)``.

    The other arguments are those of ``FeatureLayers``.
    """

    def __init__(
        self,
        model: nn.Module,
        feature_layer_path: str,
        *,
        attach: bool = False,
        transform: Transforms = None,
        edit: Mapping[Any, Any] | None = None,
        caches: bool = True,
    ) -> None:
        """Look the path up; with ``attach=True``, put the hook on the model."""
        super().__init__(model, [feature_layer_path], attach=attach, transform=transform, edit=edit, caches=caches)
        if len(self._targets(Index(model))) > 1:
            raise SelectorError(f"{feature_layer_path!r} chooses several layers; FeatureLayers takes those.")
        self.feature_layer_path = feature_layer_path

    def _result(self, named: Named, output: Any) -> Any:
        return named[0][1], output


class FeatureExtractor(Featured):
    """A model whose output is a dict of the outputs of chosen layers.

    >>> import torch
    >>> extractor = FeatureExtractor(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9)), ["0", "1"], stop=True)
    >>> list(extractor(torch.ones(1, 2)))
    ['0', '1']

    ``stop=True`` ends the forward pass at the last of them, for perceptual losses and distillation: what comes after it
    costs nothing. The other arguments are those of ``FeatureLayers``.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_names: Iterable[str],
        *,
        attach: bool = False,
        transform: Transforms = None,
        edit: Mapping[Any, Any] | None = None,
        caches: bool = True,
        stop: bool = False,
    ) -> None:
        """Look the names up; with ``attach=True``, put the hooks on the model."""
        super().__init__(model, layer_names, attach=attach, transform=transform, edit=edit, caches=caches, stop=stop)
        self.layer_names: list[str] = self.paths

    def _result(self, named: Named, output: Any) -> Any:
        return dict(named)


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
