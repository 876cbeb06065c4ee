"""The catalogue of edits: what a session may do to a passing value before the model goes on with it.

An edit is any function ``f(value)`` or ``f(value, site)`` that returns the new value, or ``None`` to leave the
value as it is. Those here never write to the value itself. On a nested value, ``zero``, ``scale``, ``clamp``,
``noise`` and ``mean`` change every floating-point tensor; the others need to be told which one with ``at``. Where there
is none, as before an embedding, ``zero`` and ``clamp`` change the integers; the others refuse.

They are values: they print as they were written, compare by what they hold, and pickle.

>>> import torch
>>> add(torch.ones(768)) == add(torch.ones(768)), [scale(2), at("0", zero())]
(True, [edits.scale(2), edits.at('0', edits.zero())])
"""

from torchhook.edits.adapting import adapt as adapt
from torchhook.edits.adapting import changes_call as changes_call
from torchhook.edits.blocking import block
from torchhook.edits.catalogue import add, at, clamp, mean, noise, patch, replace, scale, zero
from torchhook.edits.catalogue import is_same_in_every_step as is_same_in_every_step
from torchhook.edits.changing import check as check
from torchhook.edits.protocol import Edit
from torchhook.edits.protocol import EditSite as EditSite
from torchhook.edits.protocol import StepsToCome as StepsToCome
from torchhook.edits.protocol import asks_step as asks_step
from torchhook.edits.protocol import placed as placed
from torchhook.edits.protocol import steps_to_come as steps_to_come
from torchhook.edits.where import along, only

__all__ = [
    "Edit",
    "add",
    "along",
    "at",
    "block",
    "clamp",
    "mean",
    "noise",
    "only",
    "patch",
    "replace",
    "scale",
    "zero",
]
