"""The end of a run: a store that is whole, or an error that names what is not there; and what an interrupt has left."""

from __future__ import annotations

import contextlib
import os

from torchhook._extract import claims
from torchhook._extract.task import Task
from torchhook._features.api import Features, Manifest, Store, open_features, shown
from torchhook._words import counted
from torchhook.errors import DataWarning, IncompleteStoreError, note, warn


def finish(store: Store, task: Task, whole: Manifest, engine: str) -> Features:
    """Check that every shard is there, write the index, and open the store."""
    missing = store.finish(whole, task.entries)
    if missing:
        task.flush()
        raise _incomplete(store, whole, missing, engine)
    if engine == "torchrun":
        # Nothing is left to claim; ranks that were killed have left their claims behind.
        claims.clear(store.storage)
    features = open_features(store.url)
    if task.forward.special is not None:
        _warn_if_empty(features)
    return features


def _warn_if_empty(features: Features) -> None:
    """Tell of columns in which no token was left: wrong ids leave out everything, and no row would say so."""
    ragged = [spec.name for spec in features.manifest.columns if spec.ragged and not spec.text]
    empty = [name for name in ragged if not _has_tokens(features, name)]
    if empty and len(features):
        warn(
            f"{', '.join(map(repr, map(shown, empty[:3])))}: no row has a token that is neither padding nor special; "
            "all of them are stored empty. See drop_special= and lengths=.",
            DataWarning,
        )


def _has_tokens(features: Features, name: str) -> bool:
    # Mostly the first shard tells; its header is enough.
    return any(features[name].token_count(shard) for shard in range(features.manifest.shards or 0))


_WHY = {
    "local": "They were written, and then moved or deleted while the run went on.",
    "torchrun": "A rank was killed or never came, or wrote to another folder: do all machines share this one?",
    "ray": "The workers have written them, but not here: do all machines of the cluster share this folder?",
}


def _incomplete(store: Store, whole: Manifest, missing: list[int], engine: str) -> IncompleteStoreError:
    first = whole.span(missing[0])[0]
    together = next((i for i, shard in enumerate(missing) if shard != missing[0] + i), len(missing))
    rows = f"rows {first} to {whole.span(missing[together - 1])[1] - 1}" + " and others" * (together < len(missing))
    return IncompleteStoreError(
        f"{store.url}: {rows} are not there at the end of the run ({len(missing)} of "
        f"{counted(whole.shards or 0, 'shard')}). {_WHY[engine]} The same call again does only what is missing."
    )


def kept(out: str | os.PathLike[str]) -> tuple[int, int | None]:
    """How many rows a store has by now, and how many it will have, if one knows."""
    store = Store(out)
    found = store.manifest()
    if found is None:
        return 0, None
    return sum(entry.rows for entry in store.contents(found).entries([])), found.rows


def tell_kept(error: BaseException, out: str | os.PathLike[str]) -> None:
    with contextlib.suppress(Exception):  # the interrupt is what matters
        rows, total = kept(out)
        note(error, f"{rows:,}{'' if total is None else f' of {total:,}'} rows are kept in {os.fspath(out)}.")
