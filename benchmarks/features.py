"""The features of a data set to disk, beside what people do by hand and Hugging Face's ``map``.

    python benchmarks/features.py [--json results.json]

The forward passes alone, ended by hand at the layer, are 1; a way that takes twice as long has 0.5. The ReLU after the
layer works in place, as in most networks of images: rows on disk are compared with clones. How extraction compares with
the disk, and how reading does, is in ``extract.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bare import same
from capture import message
from results import Report, Row
from torch import Tensor, nn

import torchhook as th

FOLDER = os.environ.get("TORCHHOOK_BENCH_FOLDER", tempfile.gettempdir())
BATCH, LAYER = 32, "body.4"


class Stop(BaseException):
    """Ends a forward pass by hand."""


class Net(nn.Module):
    """Convolutions with ReLUs that overwrite what they are given, and a head that is not needed."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4)]
        for _ in range(3):
            parts += [nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def over(model: nn.Module, rows: Tensor, take: Callable[[Tensor], object], stop: bool = True) -> None:
    """A bare hook over batches of rows."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        take(output)
        if stop:
            raise Stop

    handle = model.get_submodule(LAYER).register_forward_hook(hook)
    with torch.no_grad():
        for low in range(0, len(rows), BATCH):
            with contextlib.suppress(Stop):
                model(rows[low : low + BATCH])
    handle.remove()


def forward_only(model: nn.Module, rows: Tensor, out: Path) -> None:
    over(model, rows, lambda output: None)


def extracted(model: nn.Module, rows: Tensor, out: Path) -> Callable[[], Tensor]:
    features = th.extract(model, rows, LAYER, out / "store", batch_size=BATCH, progress=False)
    return lambda: torch.as_tensor(features[LAYER][: len(rows)])


def list_and_save(model: nn.Module, rows: Tensor, out: Path) -> Callable[[], Tensor]:
    """As most scripts do: a hook that appends what it sees, ``torch.save`` at the end; the model runs to its end."""
    parts: list[Tensor] = []
    over(model, rows, lambda output: parts.append(output.detach().cpu()), stop=False)
    torch.save(torch.cat(parts), out / "all.pt")
    return lambda: torch.load(out / "all.pt")


def list_of_clones(model: nn.Module, rows: Tensor, out: Path) -> Callable[[], Tensor]:
    parts: list[Tensor] = []
    over(model, rows, lambda output: parts.append(output.detach().clone()))
    torch.save(torch.cat(parts), out / "all.pt")
    return lambda: torch.load(out / "all.pt")


def numpy_parts(model: nn.Module, rows: Tensor, out: Path) -> Callable[[], Tensor]:
    names = itertools.count()
    over(model, rows, lambda output: np.save(out / f"{next(names):06}.npy", output.detach().numpy()))
    return lambda: torch.from_numpy(np.concatenate([np.load(path) for path in sorted(out.glob("*.npy"))]))


def hugging_face_map(model: nn.Module, rows: Tensor, out: Path) -> Callable[[], Tensor]:
    import datasets

    datasets.disable_progress_bars()

    def features(batch: dict[str, Any]) -> dict[str, Any]:
        kept: list[Tensor] = []
        over(model, rows[batch["row"]], lambda output: kept.append(output.clone()))
        return {"feature": kept[0].numpy()}

    table = datasets.Dataset.from_dict({"row": list(range(len(rows)))})
    mapped = table.map(features, batched=True, batch_size=BATCH, cache_file_name=str(out / "cache.arrow"))
    return lambda: torch.as_tensor(np.asarray(mapped.with_format("numpy")["feature"][:]))


WAYS: dict[str, Callable[[nn.Module, Tensor, Path], Any]] = {
    "forward passes alone": forward_only,
    "th.extract": extracted,
    "a list, torch.save": list_and_save,
    "a list of clones, torch.save": list_of_clones,
    "np.save of each batch": numpy_parts,
    "Hugging Face map": hugging_face_map,
}


def wrong_rows(found: Tensor, model: nn.Module, rows: Tensor) -> int:
    parts: list[Tensor] = []
    over(model, rows, lambda output: parts.append(output.clone()))
    true = torch.cat(parts)
    if found.shape != true.shape:
        return len(rows)
    return sum(not same(a, b, 1e-5) for a, b in zip(found, true, strict=True))


def measure(rounds: int, count: int) -> list[Row]:
    torch.manual_seed(0)
    model, rows = Net().eval(), torch.rand(count, 3, 32, 32)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    wrong: dict[str, int] = {}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):  # the first turn warms up, and is judged
        for way, run in WAYS.items():
            if way in failed:
                continue
            out = Path(tempfile.mkdtemp(dir=FOLDER))
            start = time.perf_counter()
            try:
                read = run(model, rows, out)
                took = time.perf_counter() - start
                if turn:
                    seconds[way].append(took)
                elif read is not None:
                    wrong[way] = wrong_rows(read(), model, rows)
                del read
            except Exception as error:
                failed[way] = message(error)
            shutil.rmtree(out, ignore_errors=True)
            # What is left to write would be written in the next one's time.
            os.sync()
    work = f"{count:,} rows of {48 * 64 * 4 // 1024} KiB from a small model, one core"
    first = seconds["forward passes alone"]
    found = []
    for way, times in seconds.items():
        ratio = median(a / b for a, b in zip(first, times, strict=True)) if times else None
        values = len(rows) if way in wrong else None
        note = failed.get(way, "")
        found.append(Row(work, way, ratio, wrong=wrong.get(way), values=values, note=note, more_is_better=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("Features to disk, on a CPU", options.json)
    report.add(*measure(options.rounds, options.rows))
    report.close()


if __name__ == "__main__":
    main()
