"""Writes ``docs/roles.md``: which standard names are found on which configs of transformers.

``PYTHONPATH=src:. python -m tests.roles_table`` runs all of them, a minute or two; what is above the table is kept.
"""

from __future__ import annotations

from pathlib import Path

import tests.conftest  # noqa: F401  (torchvision beside a CPU build of torch)
import torchhook as th
from tests.roles_models import MODELS, build
from torchhook.types import Roles

PAGE = Path(__file__).parents[1] / "docs" / "roles.md"
MARK = "<!-- written by tests/roles_table.py -->"
KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "pattern")
KINDS += ("router", "experts", "embed", "norm_final", "logits")


def table() -> str:
    """One row for each config: what is found, and why the rest is refused."""
    lines = [f"| model | {' | '.join(f'`@{kind}`' for kind in KINDS)} |", f"|---{'|:-:' * len(KINDS)}|"]
    for name, (kind, _config) in MODELS.items():
        names = _kinds(th.roles(build(name, attn_implementation="eager") if name in EAGER else build(name)))
        cells = ["●" if names.get(k) == "all" else "◐" if names.get(k) else "" for k in KINDS]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    return "\n".join(lines)


EAGER = frozenset(MODELS) - {"albert", "mamba"}
"""Loaded with ``attn_implementation="eager"``, so that patterns are made at all."""


def _kinds(roles: Roles) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (*roles.sites, *roles.refused):
        head, _, last = name.rpartition(".")
        kind = (head if last.isdecimal() else name).rpartition(".")[2]
        here = name in roles.sites
        before = found.get(kind)
        found[kind] = ("all" if here else "") if before is None else before if here == (before == "all") else "some"
    return found


def main() -> None:
    above = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{above}{MARK}\n\n{table()}\n")


if __name__ == "__main__":
    main()
