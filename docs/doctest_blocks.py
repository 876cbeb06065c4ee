"""What the reference is read with: examples in docstrings as code, and functions where Python finds functions.

A doctest outside of a section is a quotation to Markdown.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts a fence around every doctest of a docstring, and takes a function for one where its file has its name."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for room in [module for module in pkg.modules.values() if not module.is_alias]:
            for name, target in list(room.imports.items()):
                file = room.members.get(name)
                # ``torchhook.plot.overlay`` is the function, since the import comes last; griffe takes it for the file.
                if isinstance(file, griffe.Module) and target == f"{file.path}.{name}":
                    function = file.members[name]
                    room.members[name] = griffe.Alias(name, function, parent=room)
                    # Behind an alias nobody comes by again.
                    _fenced(function)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        _fenced(obj)


def _fenced(obj: Any) -> None:
    if obj.docstring is not None and "```pycon" not in obj.docstring.value:
        obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
