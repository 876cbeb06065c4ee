"""Selectors to ordered sites, decided before any hook is attached.

A selector is an address (``"layer4"``, ``"fc:input"``), a glob by component (``"h.*.mlp"``,
``"**.relu"``), a compiled regular expression, a module type, a module object, a predicate
``(name, module) -> bool``, or a list of these. One that chooses nothing is an error with the closest
names.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from torchhook._core.index import Index, is_callable
from torchhook._recording.address import PORTS, Site, parse, readings
from torchhook.errors import SelectorError, suggestion

Selector: TypeAlias = (
    "str | Site | re.Pattern[str] | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Sequence[Selector]"
)


class Target(NamedTuple):
    """A site together with the module that its hook goes on."""

    site: Site
    module: nn.Module
    tensor: str | None = None
    """The name of the module's own parameter or buffer, when the site is one."""


def resolve(
    model: nn.Module | Index, selectors: Selector, *, exclude: Selector | None = None, port: str = "output"
) -> list[Target]:
    """The sites that the selectors choose, in the order written and then in the order of the model.

    ``port`` is meant where a selector names none. A module that has several names is chosen once, under
    the first name that was asked for.
    """
    if port not in PORTS:
        raise SelectorError(f"port={port!r} is not a port; ports are {', '.join(map(repr, PORTS))}.")
    index = model if isinstance(model, Index) else Index(model)
    excluded = [] if exclude is None else list(_choose(index, exclude, "output"))
    left_out = {(_identity(t), None if t.site.port == "output" else t.site.port) for t in excluded}
    chosen: dict[Any, Target] = {}
    for target in _choose(index, selectors, port):
        identity = _identity(target)
        if not left_out or not left_out & {(identity, None), (identity, target.site.port)}:
            chosen.setdefault((identity, target.site.parts[1:]), target)
    if not chosen:
        raise SelectorError("exclude= leaves no site: everything that was selected is excluded too.")
    return list(chosen.values())


def _identity(target: Target) -> int:
    return id(target.module if target.tensor is None else live_tensor(target))


def _choose(index: Index, selector: Any, port: str) -> Iterator[Target]:
    if isinstance(selector, Site):  # before text, which it is too
        yield from _by_site(index, selector)
    elif isinstance(selector, str):
        yield from _by_text(index, selector, port)
    elif isinstance(selector, nn.Module):
        names = index.names(selector)
        if not names:
            raise SelectorError(
                f"this {type(selector).__name__} is not part of the model: "
                "a copy, a wrapper or another model's layer. Pass the model's own module, or its name."
            )
        yield from _by_site(index, Site(names[0], port=port))
    elif isinstance(selector, re.Pattern):
        found = _modules(index, lambda path, _: selector.search(path) is not None)
        yield from _some(
            index, found, Site("", port=port), f"regular expression {selector.pattern!r}", selector.pattern
        )
    elif isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise SelectorError(f"{selector.__name__} is a type, but not a torch.nn.Module type.")
        found = _modules(index, lambda _, module: isinstance(module, selector))
        types = sorted({type(m).__name__ for m in index.modules.values()})
        if not found:
            raise SelectorError(
                f"no module of the model is a {selector.__name__}. {suggestion(selector.__name__, types)}"
            )
        yield from _some(index, found, Site("", port=port), selector.__name__, selector.__name__)
    elif isinstance(selector, (list, tuple, set, frozenset)):
        if not selector:
            raise SelectorError("an empty list selects nothing. Name at least one site, or '**' for every module.")
        for part in selector:
            yield from _choose(index, part, port)
    elif callable(selector):
        name = getattr(selector, "__name__", type(selector).__name__)
        yield from _some(index, _modules(index, selector), Site("", port=port), f"predicate {name}", name)
    else:
        raise SelectorError(
            f"{selector!r} ({type(selector).__name__}) is not a selector. Use an address or glob, a compiled regular "
            "expression, a module type, a module of the model, a predicate (name, module) -> bool, or a list of these."
        )


def _modules(index: Index, accept: Callable[[str, nn.Module], Any]) -> list[str]:
    return [path for path, module in index.modules.items() if accept(path, module)]


def _some(index: Index, paths: list[str], site: Site, what: str, text: str) -> Iterator[Target]:
    """``site`` at each of the paths that a pattern found, less containers without a forward."""
    running = [path for path in paths if is_callable(index.modules[path])]
    if not paths:
        raise SelectorError(f"{what} matches no module. {suggestion(text, index.modules)}")
    if not running:
        raise SelectorError(f"{what} matches only containers that are never called: {', '.join(map(repr, paths[:4]))}.")
    _, op, call, port = site.parts
    for path in running:
        yield Target(Site(path, op, call, port), index.modules[path])


def _by_text(index: Index, text: str, port: str) -> Iterator[Target]:
    module = index.find(text)
    if module is not None and is_callable(module):
        yield Target(Site(text, port=port), module)
        return
    site = _parsed(index, text)
    if site.port == "output" and not text.endswith(":output"):
        site = site.but(port=port)
    if not _is_glob(site.path) or _found(index, site) is not None:
        yield from _by_site(index, site)
        return
    matches = glob_pattern(site.path).fullmatch
    # The model itself is no component of a path: a glob never means it.
    paths = [path for path in index.modules if path and matches(path + ".")]
    # "**.weight" means parameters too; "layer1.*" means modules, unless there are none. "**" alone never means
    # parameters: whoever writes it wants what flows, and of a model without layers that is its own output.
    everything = set(site.path.split(".")) <= {"*", "**"}
    tensors = (not paths and not everything) or not _is_glob(_last(site.path))
    names = [name for name in index.tensors if matches(name + ".")] if tensors else []
    if not paths and not names:
        raise SelectorError(f"{text!r} matches nothing. {_glob_hint(index, site.path)}")
    if paths:
        yield from _some(index, paths, site, repr(text), site.path)
    for name in names:
        yield Target(site.but(path=name), *index.tensors[name])


def _parsed(index: Index, text: str) -> Site:
    """The longest reading of an address that the model knows, exact names first: they need no walk."""
    options = list(readings(text))
    for site in options:
        if index.find(site.path) is not None or index.find_tensor(site.path) is not None:
            return site
    site = parse(text, index.modules)
    return site if site.path in index.modules else parse(text, index.tensors)


def _found(index: Index, site: Site) -> Target | None:
    """The module, parameter or buffer of a site."""
    path = site.path
    module = index.find(path)
    if module is not None:
        return Target(site, module)
    tensor = index.find_tensor(path)
    if tensor is not None:
        return Target(site, *tensor)
    if path in index.modules:  # a name with a dot in it
        return Target(site, index.modules[path])
    return Target(site, *index.tensors[path]) if path in index.tensors else None


def _by_site(index: Index, site: Site) -> Iterator[Target]:
    target = _found(index, site)
    if target is None:
        raise SelectorError(f"no layer {site.path!r} in the model. {_name_hint(index, site.path)}")
    if target.tensor is None and not is_callable(target.module):
        raise SelectorError(
            f"{site.path!r} is a {type(target.module).__name__}: a container that is never called, so nothing passes "
            f"there. Select its members: '{site.path}.*'."
        )
    yield target


def _name_hint(index: Index, path: str) -> str:
    head, colon, port = path.rpartition(":")
    if colon and head in index.modules:
        return f"{head!r} is one, but {port!r} is no port; ports are {', '.join(map(repr, PORTS))}."
    deeper = [p for p in index.modules if p.endswith("." + path)]
    if len(deeper) > 1:
        return f"'**.{path}' would choose {len(deeper)}: {', '.join(map(repr, deeper[:3]))}, …"
    dotted = re.sub(r"\[(\d+)\]", r".\1", path)  # blocks[3], as one writes it in Python
    if dotted != path and dotted in index.modules:
        return f"Did you mean {dotted!r}?"
    flat = next((name for name in index.tensors if _last(name) == "_flat_param"), None)
    if flat is not None and path.rpartition(".")[0] in index.modules:
        return f"FSDP has made parameters one, as {flat!r}: with use_orig_params=True they keep their names."
    return suggestion(path, index.modules if path.count(".") == 0 else [*index.modules, *index.tensors])


def _glob_hint(index: Index, pattern: str) -> str:
    if len(index.modules) == 1:
        return "The model holds no layers: its own output is '(model)'."
    deeper = [p for p in index.modules if p and glob_pattern(f"**.{pattern}").fullmatch(p + ".")]
    if deeper:
        return (
            f"'*' stands for one level; '**.{pattern}' would choose {len(deeper)}: {', '.join(map(repr, deeper[:3]))}."
        )
    dotted = re.sub(r"\[(\d+)\]", r".\1", pattern)
    if dotted != pattern and dotted in index.modules:
        return f"Did you mean {dotted!r}?"
    return suggestion(re.sub(r"[*?\[\]]", "", pattern), index.modules)


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _is_glob(path: str) -> bool:
    return any(mark in path for mark in "*?[")


@functools.lru_cache(maxsize=256)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression over a path with a dot after every component.

    ``**`` stands for any number of components, none included; ``*``, ``?`` and ``[…]`` stay inside one.
    """
    components = (r"(?:[^.]+\.)*" if c == "**" else _component(c) + r"\." for c in pattern.split("."))
    try:
        return re.compile("".join(components), re.DOTALL)
    except re.error as error:
        raise SelectorError(f"{pattern!r} is not a glob: {error}.") from error


def _component(glob: str) -> str:
    def piece(match: re.Match[str]) -> str:
        text = match[0]
        if len(text) > 1:
            inside = re.sub(r"[\\^\[&~|]", r"\\\g<0>", text[1:-1])
            return f"[^{inside[1:]}.]" if inside.startswith("!") else f"[{inside}]"
        return {"*": "[^.]*", "?": "[^.]"}.get(text) or re.escape(text)

    return re.sub(r"\[!?[^\]]+\]|.", piece, glob, flags=re.DOTALL)


def live_tensor(target: Target) -> Tensor:
    """The parameter or buffer that a tensor target names, as the module holds it now."""
    assert target.tensor is not None
    value = getattr(target.module, target.tensor)
    assert isinstance(value, Tensor)
    return value


Names = Callable[[], Iterable[tuple[str, str]]]
"""Finds pairs of a name and the one that it stands for."""


def other_names(index: Index, targets: list[Target], more: Names) -> Names:
    """Finds the other names that shared modules and parameters have, when they are asked for.

    That takes a walk through the model, and is asked for where a name is not found, or a recording saved. It knows the
    model only as long as it lives.
    """
    model = weakref.ref(index.root)
    known = [(weakref.ref(target.module), target.tensor, target.site.path) for target in targets]

    def find() -> Iterator[tuple[str, str]]:
        yield from more()
        if (root := model()) is None:
            return
        walked = Index(root)
        for module, tensor, path in known:
            if (owner := module()) is None:
                continue
            if tensor is None:
                names = walked.names(owner)
            else:
                held = getattr(owner, tensor, None)
                names = [p for p, (m, name) in walked.tensors.items() if getattr(m, name) is held]
            yield from ((name, path) for name in names if name != path)

    return find
