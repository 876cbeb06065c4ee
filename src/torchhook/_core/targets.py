"""What selectors come to: sites, each with the module that its hook goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from torchhook._core.index import is_script
from torchhook._recording.address import Site


class Target(NamedTuple):
    """A site together with the module that its hook goes on."""

    site: Site
    module: nn.Module
    tensor: str | None = None
    """The name of the module's own parameter or buffer, when the site is one."""


new = tuple.__new__  # twice as fast as Target(…)


def identity(target: Target) -> int:
    """The same for all targets of one module or tensor."""
    return id(target.module if target.tensor is None else live_tensor(target))


def live_tensor(target: Target) -> Tensor:
    """The parameter or buffer that a tensor target names, as the module holds it now."""
    assert target.tensor is not None
    value = getattr(target.module, target.tensor)
    assert isinstance(value, Tensor)
    return value


class Outputs(Sequence[Target]):
    """Targets that are what different modules return, and nothing else: a hook behind each is all that they need.

    Sites and modules stand in lists beside each other: what holds them together by pairs is for the garbage collector
    to go through, and a session may be opened on hundreds of them for each call of a model.
    """

    __slots__ = ("modules", "sites")

    def __init__(self, sites: tuple[Site, ...], modules: Sequence[nn.Module]) -> None:
        self.sites, self.modules = sites, modules

    @classmethod
    def of(cls, targets: Sequence[Target], root: nn.Module) -> Outputs | None:
        """Those targets of a model; ``None`` where they are more than this."""
        if not targets:
            return None
        sites, modules, tensors = zip(*targets, strict=True)
        if any(tensors) or len(set(map(id, modules))) != len(modules) or [1 for site in sites if not site.is_output]:
            return None
        # Few, of hundreds. TorchScript takes no hooks.
        kinds: dict[type, nn.Module] = dict(zip(map(type, modules), modules, strict=True))
        return None if is_script(root) or any(map(is_script, kinds.values())) else cls(sites, modules)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Target]:
        for site, module in zip(self.sites, self.modules, strict=True):
            yield new(Target, (site, module, None))

    @overload
    def __getitem__(self, index: int) -> Target: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Target]: ...
    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]
