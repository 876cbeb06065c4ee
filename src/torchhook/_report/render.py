"""From plain data to one HTML file. Nothing here runs a model or knows a tensor."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from torchhook._report.facts import Page
from torchhook.errors import require

_LIGHT = (
    "path", "type", "parent", "depth", "parameters", "runs", "shared_with", "ran", "seconds", "own", "silent", "idle",
)  # fmt: skip


def render(page: Page) -> str:
    """The page as HTML that needs no network: style, script, data and pictures are inside."""
    jinja2 = require("jinja2", "report")
    here = resources.files("torchhook._report")
    # Titles and layer names are a user's text: escaped. A field that is renamed must fail here, not leave a gap.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: (here / "templates" / name).read_text("utf-8")),
    )  # fmt: skip
    plain = page.plain()
    tree, details = [], []
    for facts, layer in zip(page.layers, plain.pop("layers"), strict=True):
        calls = layer["calls"]
        light = {key: layer[key] for key in _LIGHT} | {"shape": facts.output or None}
        tree.append(light | {key: calls[0][key] if calls else None for key in ("dtype", "nbytes")})
        del layer["outputs"]  # said in the tree, and many where a model generates
        details.append(layer)
    return str(
        environment.get_template("report.html.j2").render(
            page=page,
            css=_asset(here, "report.css"),
            # In one scope, where a const or class is unknown above its line: what others use comes first.
            scripts=[_asset(here, name) for name in ("format.js", "tree.js", "detail.js", "report.js")],
            # One line per layer: the browser reads only those that are looked at.
            details="\n".join(_json(layer) for layer in details),
            data=_json({**plain, "layers": tree}),
        )
    )


def _asset(here: Any, name: str) -> str:
    return str((here / "assets" / name).read_text("utf-8"))


def _json(value: Any) -> str:
    """JSON that may stand inside a script element, with numbers that are not finite as ``null``."""
    # Python would write NaN, which JSON.parse refuses; and a </script> in a name would end the element.
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # The page shows four digits; all seventeen would only make it larger.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
