"""Compiled sides: a session runs their layers eagerly, so that the compiled code itself runs once more, outside any."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from torchhook._core import calling
from torchhook._diff import runs
from torchhook._recording.address import Site
from torchhook._recording.differences import Diff, Row, compare
from torchhook._recording.records import Recording
from torchhook._recording.tolerances import Limits
from torchhook._torch import compiler
from torchhook._values import tree

SITE = "(compiled output)"
"""What the row of the compiled code is called: no module has a name with blanks and brackets."""

_EAGERLY = "compiled: the layers ran eagerly, since compiled code ignores hooks; "
_RAN = f"{_EAGERLY}the row {SITE} is what the compiled code itself makes"


def is_compiled(side: Any) -> bool:
    """Whether a side is a model that is compiled, or has parts that are: its own output is made by compiled code."""
    return isinstance(side, nn.Module) and any(compiler.is_compiled(part) for part in side.modules())


def output(model: nn.Module, inputs: Any) -> Recording:
    """What a model returns as it is, in no session."""
    made = Recording(type(model).__name__)
    # Copied: a CUDA graph writes to the same memory when it runs the next time.
    value = tree.map_tensors(Tensor.clone, calling.call(model, runs.fitting(model, inputs)))
    made.opened(Site("")).append((0, next(made.order), value))
    return made


def reason_not_to_run(found: Diff) -> str | None:
    """Why the compiled code of a side cannot be judged, if so."""
    if not any(_is_output(row) for row in found):
        return "the output of the model is not compared"
    if not compiler.runs_compiled_code():
        return "a session is open, or the stance of torch.compiler is eager"
    return None


def _is_output(row: Row) -> bool:
    # Where A's output is that of a part of B, compiled code has no counterpart.
    return row.site == row.other == "" and row.status not in ("only in A", "only in B")


def not_run(found: Diff, reason: str) -> Diff:
    return Diff(found.rows, found.title, [*found.notes, f"{_EAGERLY}its compiled code did not run: {reason}"])


def told(found: Diff, a: Recording, b: Recording, limits: Limits) -> Diff:
    """The result with a row for the outputs of two recordings, of which at least one is of compiled code."""
    # Which dtypes are met on the way is not seen here: the limits have seen it.
    row = compare(_output_alone(a), _output_alone(b), limits=limits.of_all_layers())[0]
    return Diff([*found, dataclasses.replace(row, site=SITE, other=SITE)], found.title, [*found.notes, _RAN])


def _output_alone(recording: Recording) -> Recording:
    made = Recording(recording.model_name)
    made.opened(Site("")).append((0, next(made.order), recording.records(Site(""))[0].value))
    return made
