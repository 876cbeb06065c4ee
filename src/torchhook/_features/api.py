"""What other rooms use of a feature store: reading it, and the files that extraction writes. Nothing runs a model."""

from torchhook._features.columns import Column
from torchhook._features.dataset import FeatureDataset
from torchhook._features.differences import CHANGES, OBJECT
from torchhook._features.direct_io import empty as aligned_empty
from torchhook._features.features import Features, open_features
from torchhook._features.index import Contents, Entry, Page
from torchhook._features.manifest import IDS, LABELS, ColumnSpec, Manifest, shown, versions
from torchhook._features.manifest import NAME as STORE
from torchhook._features.statistics import check_options
from torchhook._features.storage import Folder, Storage, absolute
from torchhook._features.store import Store
from torchhook._features.tokens import TokenLoader, Tokens
from torchhook._features.verify import Report, verify

__all__ = [
    "CHANGES",
    "IDS",
    "LABELS",
    "OBJECT",
    "STORE",
    "Column",
    "ColumnSpec",
    "Contents",
    "Entry",
    "FeatureDataset",
    "Features",
    "Folder",
    "Manifest",
    "Page",
    "Report",
    "Storage",
    "Store",
    "TokenLoader",
    "Tokens",
    "absolute",
    "aligned_empty",
    "check_options",
    "open_features",
    "shown",
    "verify",
    "versions",
]
