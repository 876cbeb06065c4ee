"""``roles`` finds the standard names of a model, ``lens`` reads its stream through its own head."""

from torchhook._roles.lens import lens as lens
from torchhook._roles.names import roles as roles
from torchhook._roles.table import Roles as Roles
