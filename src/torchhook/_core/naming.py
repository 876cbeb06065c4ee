"""Standard names (``@resid_post.3``) to sites: the one place where selectors ask for them.

What a name stands for is found and proven higher up (``_roles``), which registers itself here: the core only looks it
up, so that a name is taken wherever a selector is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import nn

from torchhook._core.index import Index, glob_pattern, is_glob
from torchhook._recording.address import Site, readings
from torchhook.errors import SelectorError, suggestion


class Names(Protocol):
    """What standard names stand for in one model: sites by name, without the ``@``, and why others are refused."""

    @property
    def sites(self) -> Mapping[str, Site]: ...

    @property
    def refused(self) -> Mapping[str, str]: ...

    @property
    def times(self) -> Mapping[Site, Collection[int]]:
        """How often the operations run that names stand for, in a call of their modules: as it was when shown."""
        ...

    @property
    def eval_only(self) -> Mapping[str, str]:
        """Names that are right in eval mode alone, each with what does not hold while the model trains."""
        ...


Finder = Callable[[nn.Module], Names]
"""Finds the names of a model for which none are known yet."""

# By id: a user's class may define equality, or no hash. The entry goes with the model.
_known: dict[int, tuple[Names, object]] = {}
_finders: list[Finder] = []


def register(finder: Finder) -> None:
    """Have names found by ``finder`` where a model has none yet."""
    _finders[:] = [finder]


def remember(model: nn.Module, names: Names) -> None:
    """Let selectors of this model mean these names from here on."""
    if id(model) not in _known:
        weakref.finalize(model, _known.pop, id(model), None)
    _known[id(model)] = names, _kernel(model)


def known(model: nn.Module) -> Names | None:
    """The names of a model, if they were found before, and it attends in the same way still."""
    names, kernel = _known.get(id(model), (None, None))
    return names if kernel == _kernel(model) else None


def _kernel(model: nn.Module) -> object:
    """How a model of transformers attends, which it can be told: its queries and maps are elsewhere then."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def times(model: nn.Module, site: Site) -> Collection[int]:
    """How often the operation that a name stands for may run in a call of its module; nothing, where any number may."""
    names = known(model) if site.role else None
    return () if names is None else names.times.get(Site(site.path, site.op), ())


def eval_only(index: Index, site: Site) -> Callable[[], None] | None:
    """What to ask whenever a value passes a name that is right in eval mode alone; ``None`` for all others."""
    names = known(index.root) if site.role else None
    why = None if names is None else names.eval_only.get(site.role.removeprefix("@"))
    if why is None:
        return None
    parts = site.path.split(".") if site.path else []
    # Those around it too: what is dropped is dropped by the block, behind the module whose output it was.
    around = [index.find(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    modules = [module for module in around if module is not None]

    def ask() -> None:
        if any(module.training for module in modules):
            place = site.place.every_call.shown
            raise SelectorError(
                f"{site.role!r} stands for {place!r} in eval mode only, and the model is in training mode: {why} Call "
                f"model.eval(), or name {place!r} itself."
            )

    return ask


def plain(model: nn.Module) -> list[tuple[str, str]]:
    """Names that stand for all that one module returns, each with the module's path; of those found before."""
    names = known(model)
    found = {} if names is None else names.sites
    return [(f"@{name}", site.path) for name, site in found.items() if site == site.path]


def sites(model: nn.Module, text: str, port: str = "output") -> list[Site]:
    """The sites that a standard name, or a glob of them, stands for: ``@resid_post.*``, ``@z.3:grad``, ``@q.0#1``."""
    name, call, port = _read(text, port)
    names = known(model)
    if names is None:  # and not "or": there may be none that could be shown
        names = _find(model)
    if not is_glob(name):
        return [_one(names, name, call, port)]
    matches = glob_pattern(name).fullmatch
    found = [known for known in names.sites if matches(known + ".")]
    if not found:
        refused = [f"@{known}: {why}" for known, why in names.refused.items() if matches(known + ".")]
        why = f"Refused were {'; '.join(refused[:3])}" if refused else suggestion(f"@{name}", _starred(names.sites))
        raise SelectorError(f"{text!r} stands for no site of this model. {why}")
    return [_one(names, known, call, port) for known in found]


def _read(text: str, port: str) -> tuple[str, Any, str]:
    """Name, calls and port of an address whose path is a standard name."""
    *_, site = readings(text)
    port = site.port if text.rpartition(":")[2].startswith(site.port) else port
    if port not in ("output", "grad", "grad_total") or site.leaf or site.op is not None:
        found = f"{site.port}.{site.leaf}" if site.leaf else port if site.op is None else f"/{site.op}"
        raise SelectorError(
            f"{text!r}: a standard name means one value, so its port is ':grad', ':grad_total' or none, not {found!r}."
        )
    return site.path.removeprefix("@"), site.call, port


def _find(model: nn.Module) -> Names:
    if not _finders:
        raise SelectorError("standard names such as '@resid_post.3' need torchhook itself: import torchhook.")
    return _finders[0](model)


def _one(names: Names, name: str, call: Any, port: str) -> Site:
    site = names.sites.get(name)
    if site is None:
        if name in names.refused:
            raise SelectorError(f"'@{name}' is not known to be anywhere in this model: {names.refused[name]}")
        near = suggestion(f"@{name}", [f"@{known}" for known in names.sites])
        raise SelectorError(f"there is no '@{name}' in this model. {near}")
    if port == "grad" and site.port == "input":
        port = "grad_input"
    elif port == "grad_total" and site.port == "input":
        raise SelectorError(
            f"'@{name}:grad_total' is not defined: the value is what {site.shown!r} takes. Use ':grad'."
        )
    return site.but(call=call, port=site.port if port == "output" else port, role=f"@{name}")


def _starred(names: Mapping[str, Site]) -> list[str]:
    """Names with ``*`` for their numbers: of a deep model, there are too many of them to choose a near one from."""
    starred = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    return [f"@{name}" for name in dict.fromkeys(starred)]
