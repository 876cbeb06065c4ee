"""What a model is besides its numbers: the code that its classes run, and the plain values that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchhook._core.index import Index
from torchhook._extract.function_fingerprint import Code, Texts, digest
from torchhook._features.api import CHANGES

# Hooks, modes, parameters: what every module has. And where one was loaded from, which is another place elsewhere; and
# how one is trained.
_OWN = frozenset(vars(nn.Module())) | {"name_or_path", "gradient_checkpointing"}
_LONG = 60


def facts(index: Index, functions: Mapping[str, Any]) -> dict[str, str]:
    """What the classes of a model and the functions of a call are made of, by name."""
    found = {**_classes(index), **_attributes(index)}
    for name, function in functions.items():
        texts = Texts().of(function)
        # Without values of its own, its code says it all, which the manifest has already.
        if texts != Texts(values=False).of(function):
            found[name] = texts
        # Modules that are called like functions have code and values of their own, as the model has.
        for module in function.values() if isinstance(function, Mapping) else (function,):
            if isinstance(module, nn.Module):
                inner = Index(module)
                found |= {f"{name}, {one}": text for one, text in {**_classes(inner), **_attributes(inner)}.items()}
    return found


def steady(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Facts before and after a run: what the run itself has changed cannot be compared with another run.

    >>> steady({"Net.scale": "2", "Net.calls": "0"}, {"Net.scale": "2", "Net.calls": "1", "Net.cache": "{}"})
    {'Net.scale': '2', 'Net.calls': '(changes as it runs)', 'Net.cache': '(changes as it runs)'}
    """
    names = dict.fromkeys((*before, *after))
    return {name: after[name] if before.get(name) == after.get(name) else CHANGES for name in names}


# -- code -----------------------------------------------------------------------------------------------


def _classes(index: Index) -> dict[str, str]:
    found: dict[str, str] = {}
    texts = Texts(deep=False, known=index.distinct)
    for cls in {type(module): None for module in index.modules.values()}:
        code = _code_of(cls)
        if code is None:
            continue
        found[cls.__qualname__] = code.digest()
        for name, value in code.values.items():
            if value is None:  # most defaults
                continue
            found[f"{cls.__qualname__}, which uses {name}"] = _short(texts.of(value))
    for path, module in index.modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            found[f"{path or 'the model'} (TorchScript)"] = digest(_script(module))
    return found


def _script(module: torch.jit.ScriptModule) -> str:
    try:
        return str(module.code)
    except (RuntimeError, AttributeError):  # without a forward of its own
        return ""


def _code_of(cls: type) -> Code | None:
    """What ``forward`` runs of a class: itself, and every method whose name it reaches."""
    code = Code()
    return code if code.methods(cls, ["forward", "__call__"]) else None


# -- values ---------------------------------------------------------------------------------------------


def _attributes(index: Index) -> dict[str, str]:
    """The attributes of all modules of a class together: their text if they all have the same, else a digest."""
    texts = Texts(deep=False, known=index.distinct)
    seen: dict[str, list[tuple[str, str]]] = {}
    for path, module in index.modules.items():
        for name, value in vars(module).items():
            if name not in _OWN:
                seen.setdefault(f"{type(module).__qualname__}.{name}", []).append((path, texts.of(value)))
    return {name: _together(held) for name, held in seen.items()}


def _together(held: list[tuple[str, str]]) -> str:
    different = {text for _, text in held}
    return _short(next(iter(different))) if len(different) == 1 else digest(repr(held))


def _short(text: str) -> str:
    return text if len(text) <= _LONG else digest(text)
