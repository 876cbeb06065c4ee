"""What hooks call, for all steps: each value is shown to the step that is running.

Nearly all of them are plain tensors like those of the steps before. What is done with these stands here on one level;
with all others, ``Step`` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard
from weakref import ref

from torch import Tensor, nn, strided

from torchhook._core.taps import Look
from torchhook._torch import in_transform, unwrapped, version_of
from torchhook._values import tree
from torchhook._values.statistics import Measure
from torchhook._watch.ledger import Ledger
from torchhook._watch.places import Places
from torchhook._watch.rows import NORM
from torchhook._watch.step import Step
from torchhook._watch.units import Made, Units


class Looks:
    """The looks of a watch, and the step that they belong to now."""

    def __init__(self, measure: Measure, units: Units) -> None:
        self.units = units
        self.step: Step | None = None
        self.has_rows: bool = measure.needed and not measure.histograms
        """Whether what is wanted of a value may be taken in one pass."""
        self.kinds: dict[Any, Any] = {}
        """Devices and dtypes of gradients, each once."""
        self._measure = measure

    def begin(self, ledger: Ledger) -> Step:
        """From here on, all is shown to a new step."""
        self.units.begin()
        self.step = step = Step(self._measure, self.units, ledger)
        return step

    def end(self) -> None:
        """The step is over, and nothing of it is held on to."""
        self.step = None

    def value(self, site: str, rectifies: bool, layer: nn.Module | None = None) -> Look:
        """At what passes a site; a ``layer`` tells where the units of what it returns are."""
        return _Value(self, site, rectifies, None if layer is None else self.units.look(layer))

    def once(self, site: str) -> Look:
        """For parameters, which are the same at every call of their module."""

        def look(value: Any, call: int) -> None:
            if self.step is not None and not self.step.has_seen(site):
                self.step.saw(site, _numbers(value) if in_transform() else value, False)

        return look

    def gradient(self, site: str) -> Look:
        return _Gradient(self, site)

    def reduced_gradient(self, site: str) -> Look:
        """For parameters whose gradient is read once all ranks have added theirs: it is the sum already."""

        def look(gradient: Tensor, call: int) -> None:
            if self.step is not None:
                self.step.saw_reduced_gradient(site, gradient)

        return look

    def parameter_gradient(self, site: str, parameter: Tensor) -> Callable[[Tensor | None], None]:
        return _ParameterGradient(self, site, parameter)


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return type(value) is Tensor and not value.is_nested and not in_transform()


def _numbers(value: Any) -> Any:
    """What is behind the wrappers of ``torch.func``: of ``vmap``, the values of all samples."""
    return tree.map_tensors(unwrapped, value)


class _Value:
    """Looks at what passes one site."""

    __slots__ = ("_looks", "_made", "_places", "_rectifies", "_shape", "_site", "_tell")

    def __init__(self, looks: Looks, site: str, rectifies: bool, tell: Look | None) -> None:
        self._looks, self._site, self._rectifies, self._tell = looks, site, rectifies, tell
        self._shape: Any = None
        self._made: Made | None = None
        self._places = Places()

    def __call__(self, value: Any, call: int) -> None:
        looks = self._looks
        step = looks.step
        if step is None:
            return
        if not looks.has_rows or not _is_plain(value):
            self._look(step, value, call)
            return
        unit, made, shape, latest = None, None, value.shape, step.latest_value
        if self._tell is not None:
            if shape != self._shape:
                self._look(step, value, call)
                return
            if self._made is not None:
                looks.units.made[shape] = self._made
        elif self._rectifies:
            made = looks.units.made.get(shape)
            if made is None or value.ndim < 2:
                self._look(step, value, call)
                return
            unit = made.dim
        found = step.values.get(self._site)
        if latest.tensor() is value and unit is None and latest.is_unchanged(value):
            row = latest.of_newest
        else:
            row = self._places.fill(step.rows, value, unit, 0 if found is None else len(found))
            if row is None or (unit is not None and not row.units):
                self._look(step, value, call)
                return
            latest.tensor, latest.of_newest = ref(value), row
            try:
                latest.version = version_of(value)
            except RuntimeError:  # an inference tensor
                latest.version = -1
        step.ran = True
        if found is None:
            step.values[self._site] = [row]
        else:
            found.append(row)
        if made is not None:
            step.masks.setdefault(self._site, []).append(((row, "live"), made))
            looks.units.made[shape] = made.after

    def _look(self, step: Step, value: Any, call: int) -> None:
        """At a value that is in some way unlike those before."""
        value = _numbers(value) if in_transform() else value
        if self._tell is not None:
            self._tell(value, call)
            if isinstance(value, Tensor) and not value.is_nested:
                self._shape, self._made = value.shape, self._looks.units.made.get(value.shape)
        step.saw(self._site, value, self._rectifies)


class _Gradient:
    """Looks at the gradient of what has passed one site."""

    __slots__ = ("_looks", "_places", "_site")

    def __init__(self, looks: Looks, site: str) -> None:
        self._looks, self._site = looks, site
        self._places = Places()

    def __call__(self, value: Any, call: int) -> None:
        step = self._looks.step
        if step is None:
            return
        if in_transform():
            value = _numbers(value)
        latest, found = step.latest_gradient, step.gradients.get(self._site)
        if type(value) is not Tensor:
            row = None
        elif latest.tensor() is value and latest.is_unchanged(value):
            row = latest.of_newest
        else:
            row = self._places.fill(step.rows, value, NORM, 0 if found is None else len(found))
            if row is not None:
                latest.tensor, latest.of_newest = ref(value), row
                try:
                    latest.version = version_of(value)
                except RuntimeError:
                    latest.version = -1
        if row is None:
            step.saw_gradient(self._site, value)
        elif found is None:
            step.gradients[self._site] = [row]
        else:
            found.append(row)


class _ParameterGradient:
    """Looks at a gradient of one parameter."""

    __slots__ = ("_kind", "_looks", "_parameter", "_site")

    def __init__(self, looks: Looks, site: str, parameter: Tensor) -> None:
        self._looks, self._site, self._parameter = looks, site, parameter
        self._kind: Any = None

    def __call__(self, gradient: Tensor | None) -> None:
        step = self._looks.step
        if step is None or gradient is None:  # torch calls hooks where none comes (pytorch#11751)
            return
        if in_transform():
            gradient = unwrapped(gradient)
            if gradient.shape != self._parameter.shape:  # one for each sample: none of them is the parameter's
                return
        if type(gradient) is Tensor and self._parameter.grad is None:
            kind = gradient.device, gradient.dtype
            # As long as it is the same parameter, its gradients are of one shape: else all looks are made anew.
            if (kind == self._kind and gradient.layout is strided) or step.ledger.can_wait(gradient):
                if kind != self._kind:
                    self._kind = self._looks.kinds.setdefault(kind, kind)
                step.ledger.norm_soon(self._site, gradient, self._kind)
                step.parameter_gradients[self._site] = self._site
                if step.waiting is None or step.waiting() is None:
                    step.wait_for_end()
                return
        step.saw_parameter_gradient(self._site, self._parameter, gradient)
