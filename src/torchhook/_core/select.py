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
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from torchhook._core import choices, naming
from torchhook._core.index import Index, glob_pattern, is_callable, is_glob
from torchhook._core.targets import Outputs, Target, identity, new
from torchhook._recording.address import PORTS, Calls, Site, call_hint, parse, readings
from torchhook._values.layout import own_kind
from torchhook.errors import SelectorError, suggestion

Selector: TypeAlias = (
    "str | Site | re.Pattern[str] | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Sequence[Selector]"
)


def resolve(
    model: nn.Module | Index, selectors: Selector, *, exclude: Selector | None = None, port: str = "output"
) -> Sequence[Target]:
    """The sites that the selectors choose, in the order written and then in the order of the model.

    ``port`` is meant where a selector names none. A module that has several names is chosen once, under
    the first name that was asked for. It is remembered, unless others have asked of the index before.
    """
    if port not in PORTS:
        raise SelectorError(f"port={port!r} is not a port; ports are {', '.join(map(repr, PORTS))}.")
    index = model if isinstance(model, Index) else Index(model)
    key = None if index.followed or index.searched else choices.key_of(selectors, exclude, port)
    if key is not None and (known := choices.recall(index, key)) is not None:
        return known
    left_out, wanted = list[Target](), list(_choose(index, selectors, port))
    left_out += () if exclude is None else _choose(index, exclude, "output")
    targets = _resolved(wanted, left_out)
    if key is not None and not [1 for target in (*targets, *left_out) if target.tensor is not None]:
        choices.remember(index, key, targets)
    return Outputs.of(targets, index.root) or targets


def _resolved(wanted: Iterable[Target], left_out: Iterable[Target]) -> list[Target]:
    chosen: dict[Any, Target] = {}
    for target in wanted:
        site, module, tensor = target
        key = id(module) if tensor is None else identity(target)
        chosen.setdefault((key, site.op, site.call, site.port, site.leaf, site.role), target)
    if left_out:
        # Apart, for those that are left out at every port are looked for by what is known of each already.
        whole, at_port = set[int](), set[tuple[int, str]]()
        for target in left_out:
            if target.site.port == "output":
                whole.add(identity(target))
            else:
                at_port.add((identity(target), target.site.port))
        chosen = {key: t for key, t in chosen.items() if key[0] not in whole and (key[0], key[3]) not in at_port}
    for target in chosen.values():
        if type(call := target.site.call) is Calls and call.is_empty:
            raise SelectorError(f"{target.site.shown!r} names no call: its calls end where they begin, or before.")
    if not chosen:
        raise SelectorError("exclude= leaves no site: everything that was selected is excluded too.")
    return list(chosen.values())


def _choose(index: Index, selector: Any, port: str) -> Iterable[Target]:
    if type(selector) is str:
        module = index.find(selector, index.followed)
        if module is not None and is_callable(module):  # an exact name, as most are
            return (new(Target, (_site(selector, port), module, None)),)
        if selector.startswith("@"):
            return [t for site in naming.sites(index.root, selector, port) for t in _by_site(index, site)]
        return _by_text(index, selector, port)
    if isinstance(selector, (list, tuple, set, frozenset)):
        if not selector:
            raise SelectorError("an empty list selects nothing. Name at least one site, or '**' for every module.")
        return _in_list(index, selector, port)
    return _by_object(index, selector, port)


def _in_list(index: Index, selectors: Iterable[Any], port: str) -> list[Target]:
    found: list[Target] = []
    for part in selectors:
        # As _choose does it, without the call: lists of a hundred exact names are common.
        module = index.find(part, index.followed) if type(part) is str else None
        if module is not None and is_callable(module):
            found.append(new(Target, (_site(part, port), module, None)))
        else:
            found.extend(_choose(index, part, port))
    return found


@functools.lru_cache(maxsize=4096)
def _site(path: str, port: str) -> Site:
    return Site(path, port=port)


def _by_object(index: Index, selector: Any, port: str) -> Iterator[Target]:
    if isinstance(selector, Site):  # before text, which it is too
        yield from _by_site(index, selector)
    elif isinstance(selector, str):
        yield from _choose(index, str(selector), port)
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
    elif callable(selector):
        name = getattr(selector, "__name__", type(selector).__name__)
        yield from _some(index, _modules(index, selector), Site("", port=port), f"predicate {name}", name)
    else:
        raise SelectorError(
            f"{selector!r} ({type(selector).__name__}) is not a selector. Use an address or glob, a compiled regular "
            "expression, a module type, a module of the model, a predicate (name, module) -> bool, or a list of these."
        )


Found = list[tuple[str, nn.Module]]
"""Modules with their paths."""


def _modules(index: Index, accept: Callable[[str, nn.Module], Any]) -> Found:
    return [(path, module) for path, module in index.modules.items() if accept(path, module)]


def _some(index: Index, found: Found, site: Site, what: str, text: str) -> Iterator[Target]:
    """``site`` at each of the modules that a pattern found, less containers without a forward."""
    running = [(path, module) for path, module in found if is_callable(module)]
    if not found:
        raise SelectorError(f"{what} matches no module. {suggestion(text, index.modules)}")
    if not running:
        paths = ", ".join(repr(path) for path, _ in found[:4])
        raise SelectorError(f"{what} matches only containers that are never called: {paths}.")
    whole = site.op is None and site.call is None and not site.leaf
    for path, module in running:
        yield new(Target, (_site(path, site.port) if whole else site.but(path=path), module, None))


def _by_text(index: Index, text: str, port: str) -> Iterator[Target]:
    site = _parsed(index, text)
    if site.port == "output" and not site.leaf and not text.endswith(":output"):
        site = site.but(port=port)
    if not is_glob(site.path) or _exact(index, site) is not None:
        yield from _by_site(index, site)
        return
    _refuse_glob_of_operations(site)
    matches = glob_pattern(site.path).fullmatch
    # The model itself is no component of a path: a glob never means it. All are looked at where none is found: a name
    # may have a dot in it.
    found = list(index.matching(site.path)) or _modules(index, lambda path, _: path and matches(path + "."))
    # "**.weight" means parameters too; "layer1.*" means modules, unless there are none. "**" alone never means
    # parameters: whoever writes it wants what flows, and of a model without layers that is its own output.
    everything = set(site.path.split(".")) <= {"*", "**"}
    tensors = site.op is None and ((not found and not everything) or not is_glob(_last(site.path)))
    held = list(index.matching_tensors(site.path)) if tensors else []
    if not found and not held:
        raise SelectorError(f"{text!r} matches nothing. {_glob_hint(index, site.path)}")
    if found:
        yield from _some(index, found, site, repr(text), site.path)
    for path, owner, name in held:
        yield Target(site.but(path=path), owner, name)


def _parsed(index: Index, text: str) -> Site:
    """The longest reading of an address that the model knows, exact names first: they need no walk."""
    options = list(readings(text))
    for site in options:
        if index.find(site.path) is not None or index.find_tensor(site.path) is not None:
            return site
    if is_glob(options[-1].path):
        return options[-1]
    site = parse(text, index.modules)
    return site if site.path in index.modules else parse(text, index.tensors)


def _exact(index: Index, site: Site) -> Target | None:
    """The module, parameter or buffer of a site, found by name."""
    path = site.path
    module = index.find(path, index.followed)
    if module is not None:
        return Target(site, module)
    tensor = index.find_tensor(path, index.followed)
    return None if tensor is None else Target(site, *tensor)


def _found(index: Index, site: Site) -> Target | None:
    """The module, parameter or buffer of a site, whatever its name."""
    path, target = site.path, _exact(index, site)
    if target is not None:
        return target
    if path in index.modules:  # a name with a dot in it
        return Target(site, index.modules[path])
    return Target(site, *index.tensors[path]) if path in index.tensors else None


def _by_site(index: Index, site: Site) -> Iterator[Target]:
    target = _found(index, site)
    if site.op is not None and "#" in site.op:  # no operation has such a name
        raise SelectorError(f"{site.shown!r} cannot be read. {call_hint(site.op, [site.op.partition('#')[0]])}")
    if target is None:
        raise SelectorError(f"no layer {site.path!r} in the model. {_name_hint(index, site.path)}")
    _refuse_glob_of_operations(site)
    if target.tensor is None and not is_callable(target.module):
        raise SelectorError(
            f"{site.path!r} is a {type(target.module).__name__}: a container that is never called, so nothing passes "
            f"there. Select its members: '{site.path}.*'."
        )
    yield target


def _refuse_glob_of_operations(site: Site) -> None:
    if site.op is not None and is_glob(site.op):
        raise SelectorError(
            f"{site.shown!r}: operations cannot be chosen by a glob, since nobody knows them before the model runs. "
            "th.ops(model, inputs) lists them with their addresses: name those that you want, in a list. Before the "
            "'/' there may be a glob, of modules: 'blocks.*/gelu'."
        )


def _name_hint(index: Index, path: str) -> str:
    if how := call_hint(path, [*index.modules, *index.tensors]):
        return how
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
    # Whatever the glob chooses: it is the calls that cannot be read.
    if how := call_hint(pattern, [pattern.partition("#")[0]]):
        return how
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


Names = Callable[[], Iterable[tuple[str, str]]]
"""Finds pairs of a name and the one that it stands for."""
Layouts = Callable[[], Iterable[tuple[str, tuple[str, bool]]]]
"""Finds pairs of a path and what ``own_kind`` says of the module there."""


def found_later(
    index: Index, sites: Sequence[Site], names: Names = tuple, layouts: Layouts = tuple
) -> tuple[Names, Layouts]:
    """What finds the other names that shared modules and parameters have, and how modules lay out their maps.

    Both take a walk through the model, and are asked for where a name is not found, or a recording saved. They know the
    model only as long as it lives.
    """
    root = weakref.ref(index.root)
    return partial(_other_names, root, sites, names), partial(_layouts, root, sites, layouts)


def _other_names(model: Callable[[], Any], sites: Sequence[Site], more: Names) -> Iterator[tuple[str, str]]:
    yield from more()
    if (root := model()) is None:
        return
    for role, path in naming.plain(root):
        yield from ((role, path), (path, role))
    walked = Index(root)
    for path in [site.path for site in sites]:
        module, tensor = walked.find(path), walked.find_tensor(path)
        if module is not None:
            names = walked.names(module)
        elif tensor is not None:
            held = getattr(*tensor)
            names = [p for p, (m, name) in walked.tensors.items() if getattr(m, name) is held]
        else:
            continue
        yield from ((name, path) for name in names if name != path)


def _layouts(model: Callable[[], Any], sites: Sequence[Site], more: Layouts) -> Iterator[tuple[str, tuple[str, bool]]]:
    yield from more()
    if (root := model()) is None:
        return
    walked = Index(root)
    for path in dict.fromkeys([site.path for site in sites]):
        module = walked.find(path)
        if module is not None and (kind := own_kind(module)) is not None:
            yield path, kind


# -- calls ----------------------------------------------------------------------------------------------


def by_site(targets: Sequence[Target]) -> Iterable[tuple[Target, Sequence[Target], Sequence[Site]]]:
    """Each site once, with the other targets that name calls of it and all the calls that are named; mostly none are.

    A target that names no call holds those that do already.
    """
    # Lists, which are quicker than generators: this is done whenever a session opens.
    if not [target for target in targets if target.site.call is not None]:
        return [(target, (), ()) for target in targets]
    found: dict[Site, list[Target]] = {}
    for target in targets:
        found.setdefault(target.site.every_call, []).append(target)
    whole = {site: next((one for one in group if one.site.call is None), None) for site, group in found.items()}
    return [
        (group[0], group[1:], [one.site for one in group]) if whole[site] is None else (whole[site] or group[0], (), ())
        for site, group in found.items()
    ]


def refuse_counting_back(site: Site, who: str) -> None:
    """Say that a call is not known to be the last one while it runs."""
    if site.counts_back:
        raise SelectorError(
            f"{site.shown!r}: which call is the last is known only when it is over, so that {who} would come too late. "
            f"Count from the first call: '{site.but(call=0).shown}', '{site.but(call=Calls(1)).shown}'."
        )


def refuse_open_end(site: Site) -> None:
    """Say that a pass cannot end at a site whose last call is not known."""
    if isinstance(site.call, Calls) and site.call.stop is None:
        raise SelectorError(
            f"{site.shown!r}: stop=True ends the pass at the last call, and this has none. Say where it ends "
            f"('{site.but(call=Calls(site.call.start, (site.call.start or 0) + 2)).shown}'), or leave out stop=True."
        )
