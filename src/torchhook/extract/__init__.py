"""Features of whole data sets: to disk, exactly once, and back.

Writing: ``sources`` (rows of the data) → ``forward`` (hooks, early stop) → ``fill`` and ``slabs`` (the one copy) →
``writer`` → ``shards`` (bytes) → ``places`` (commit). ``task`` does that for one shard; ``engines`` and ``ray`` say who
does which; ``plan`` is what they agree on; ``run`` is the door.

Reading: ``features`` → ``values`` → ``reading``; ``dataset``, ``statistics``, ``export`` and ``verify`` use those, and
nothing there runs a model.
"""

from torchhook.extract.errors import BrokenShardError, ExtractError, IncompleteStoreError, StoreMismatchError
from torchhook.extract.features import Features, open_features
from torchhook.extract.images import ImageFolder
from torchhook.extract.measure import Estimate
from torchhook.extract.run import extract

__all__ = [
    "BrokenShardError",
    "Estimate",
    "ExtractError",
    "Features",
    "ImageFolder",
    "IncompleteStoreError",
    "StoreMismatchError",
    "extract",
    "open_features",
]
