"""``HookManager``, as TorchHook 0.2 has it: hooks by key, and the features they captured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as count_up
from typing import Any

from torch import nn

from torchhook._classic.model_summary import count_parameters
from torchhook._core import per_site
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.tables import count
from torchhook._values import tree
from torchhook._words import plural
from torchhook.errors import ArgumentError, SelectorError, suggestion
from torchhook.transforms import Transform

CustomHook = Callable[[nn.Module, Any, Any], Any]

_RULE = "-" * 80  # the summary is that of TorchHook 0.2, to the letter


class HookManager:
    """Hooks by key, and the features they captured.

    >>> import torch
    >>> manager = HookManager(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), max_size=1)
    >>> handle = manager.add("0")
    >>> output = manager.model(torch.zeros(1, 2))
    >>> manager.get("0")[0].shape
    torch.Size([1, 3])

    Features are safe, detached copies on the CPU. ``max_size`` keeps the newest of each key; -1 or 0 keeps all.
    The hooks go when the manager does, at the end of a ``with`` block, or with ``clear_hooks``.
    """

    def __init__(self, model: nn.Module, max_size: int = -1) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"'model' must be a torch.nn.Module, found {type(model).__name__}.")
        if not isinstance(max_size, int) or isinstance(max_size, bool):  # True would keep one, and hardly means to
            raise ArgumentError(f"'max_size' must be an integer, found {max_size!r}.")
        if max_size < -1:
            raise ArgumentError(f"'max_size' must be -1 (keep everything) or more, found {max_size}.")
        self.model = model
        self.max_size = max_size
        self._sessions: dict[str, tuple[Session, Site]] = {}
        self._edits: list[Session] = []

    def add(
        self,
        layer_name: Selector | None = None,
        layer: nn.Module | None = None,
        custom_hook: CustomHook | None = None,
        output_transform: Transforms = None,
        *,
        inputs: bool = False,
        grad: bool = False,
    ) -> Session | list[Session]:
        """Capture a layer, by name or selector, or as an object under a name of your choice.

        ``custom_hook(module, input, output)`` returns what to keep, or ``None`` for nothing; ``output_transform``
        changes what is kept: one for all, or a mapping by selectors, as in ``th.capture``. Either is kept as returned,
        so detach it there if you mean to. ``inputs=True`` captures what goes into the layer too, under
        ``"name:input"``, and ``grad=True`` the gradient of its output, under ``"name:grad"``. Returns a handle with
        ``remove()``; a list of them where a selector chose several layers.
        """
        if custom_hook is not None and not callable(custom_hook):
            raise ArgumentError(f"'custom_hook' must be callable, found {type(custom_hook).__name__}.")
        chosen = self._choose(layer_name, layer)
        ports = ["input"] * inputs + ["grad"] * grad  # beside the output, whose key stays what it was
        chosen += [(f"{key}:{port}", t._replace(site=t.site.but(port=port))) for port in ports for key, t in chosen]
        # All keys before any hook: an error must not leave half of a selector's layers hooked.
        for key, _ in chosen:
            if key in self._sessions:
                raise ArgumentError(f"there is a hook with key {key!r} already: remove it, or choose another name.")
        targets = [target for _, target in chosen]
        own = per_site.by_target(output_transform, Index(self.model), targets, name="'output_transform'")
        handles = []
        for (key, target), transform in zip(chosen, own, strict=True):
            session = self._session(target, custom_hook, transform)
            self._sessions[key] = (session, target.site)
            handles.append(session.open())
        return handles[0] if len(handles) == 1 else handles  # one for one layer, as PyTorch's own method gives

    register_forward_hook = add

    def edit(self, layer_name: Selector, edit: Any) -> Session:
        """Change what flows through a layer, by name or selector, as ``torchhook.edit`` does, until the hooks go."""
        session = Session(self.model, threads="all", warn=False)
        for target in resolve(session.index, layer_name):
            session.edit(target, edit)
        self._edits.append(session)
        return session.open()

    def _choose(self, layer_name: Selector | None, layer: nn.Module | None) -> list[tuple[str, Target]]:
        if layer is None:
            if layer_name is None:
                raise ArgumentError("give 'layer_name' or 'layer': there is nothing to hook.")
            return [(str(target.site), target) for target in resolve(self.model, layer_name)]
        if not isinstance(layer, nn.Module):
            raise ArgumentError(f"'layer' must be a torch.nn.Module, found {type(layer).__name__}.")
        if layer_name is None:
            kind = type(layer).__name__
            layer_name = next(key for n in count_up() if (key := f"{kind}_{n}") not in self._sessions)
        if not isinstance(layer_name, str):
            raise ArgumentError(f"'layer_name' must be a string beside 'layer', found {type(layer_name).__name__}.")
        return [(layer_name, Target(Site(""), layer))]

    def _session(self, target: Target, custom: CustomHook | None, transform: Transform | None) -> Session:
        # A layer passed as an object need not be part of the model: it is its own root then.
        root = target.module if target.site.path == "" else self.model
        # All threads, as a bare hook would; and without a report at the end, because the summary says what is waiting.
        session = Session(root, threads="all", warn=False)
        limit = self.max_size if self.max_size > 0 else None
        if custom is not None and target.site.port == "output":
            session.record_custom(target, custom, Keep("live", transform=transform), limit)
        else:
            # A transform gets the live value, and what it returns is the user's to detach: it may be a loss.
            keep = Keep("copy", device="cpu") if transform is None else Keep("live", transform=transform)
            session.record([target], keep, limit)
        return session

    def get_features(self, key: str) -> list[Any]:
        """The features captured under a key, oldest first; empty while the layer has not run."""
        session, site = self._find(key)
        # Empty and not an error: the ancestors' users look before the first call too.
        return session.recording.all(site) if site in session.recording else []

    get = get_features

    def get_all(self) -> dict[str, list[Any]]:
        """The features of every key."""
        return {key: self.get_features(key) for key in self._sessions}

    def get_keys(self) -> list[str]:
        return list(self._sessions)

    def remove(self, key: str) -> None:
        """Take a hook away, and its features with it."""
        session, _ = self._find(key)
        session.close()
        del self._sessions[key]

    def clear_features(self) -> None:
        """Forget the features; the hooks stay."""
        for session, _ in self._sessions.values():
            session.recording.clear()

    def clear_hooks(self) -> None:
        """Take every hook away, and the features with them."""
        self.__exit__()
        self._sessions.clear()
        self._edits.clear()

    def _find(self, key: str) -> tuple[Session, Site]:
        if not isinstance(key, str):
            raise ArgumentError(f"'key' must be a string, found {type(key).__name__}.")
        if key not in self._sessions:
            raise SelectorError(f"no hook with key {key!r}. {suggestion(key, self._sessions)}".rstrip())
        return self._sessions[key]

    def __enter__(self) -> HookManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The sessions are kept: features are read after the block.
        for session in [*(session for session, _ in self._sessions.values()), *self._edits]:
            session.close()

    def summary(self) -> None:
        """Print what is hooked and what was captured."""
        print(self)

    def __str__(self) -> str:
        head = f"Model: {type(self.model).__name__} | Total Parameters: {count(count_parameters(self.model))}"
        if not self._sessions:
            return f"{head}\nNo hooks have been registered."
        features = self.get_all()
        waiting = [key for key, values in features.items() if not values]
        if len(waiting) == len(features):
            what = f"{len(features)} {plural(len(features), 'hook')}"
            return f"{head}\n{what} registered ({', '.join(features)}), but no features have been captured yet."
        limit = self.max_size if self.max_size > 0 else "unlimited"
        lines = [head, f"Registered Hooks: {len(features)} (max_size={limit})", _RULE, "Captured Features Summary:"]
        lines += [f"{'Layer Key':<30}{'Feature Count':<20}Feature Shape", _RULE]
        lines += [f"{key:<30}{len(values):<20}{tree.describe(values[0])}" for key, values in features.items() if values]
        if waiting:
            lines += [_RULE, "Hooks Registered but Not Triggered Yet:", *(f"- {key}" for key in waiting)]
        return "\n".join([*lines, _RULE])

    __repr__ = __str__
