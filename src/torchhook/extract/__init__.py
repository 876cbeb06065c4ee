"""Features of whole data sets: to disk, exactly once, and back."""

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
