"""``extract`` and ``features``: whole data sets to disk, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torchhook import transforms
from torchhook._cli import console, inputs, models, options
from torchhook._cli.errors import Trouble, spoken
from torchhook._extract.api import Estimate, ImageFolder, kept
from torchhook._extract.api import extract as extract_to
from torchhook._features.api import Features, open_features
from torchhook._features.api import verify as verify_store
from torchhook._words import counted, plural

features = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Look into, check and export feature stores."
)

# By name, not by getattr(torch, ...): only types that features make sense in are offered.
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_POOLS = ("mean", "max", "sum")


def extract(
    model: options.Model,
    data: Annotated[Path, typer.Option(help="A folder of images, or a .safetensors with one tensor of rows.")],
    sites: Annotated[list[str], typer.Option("--sites", "-s", help="An address or glob. Repeatable.")],
    # Not a Path, here and below: that would make s3:/ of s3://.
    out: Annotated[str, typer.Option("--out", "-o", help="The feature store: a folder, or s3://...")] = "features",
    pool: Annotated[str | None, typer.Option(help="Keep less: mean, max or sum over positions, or cls.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Store as float16, bfloat16 or float32.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows for each call of the model.")] = 32,
    rows_per_shard: Annotated[
        int | None, typer.Option(help="Rows in each file: what is kept when it is stopped. Default: by time and size.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that load the data.")] = None,
    resume: Annotated[bool, typer.Option(help="Do only what is missing, or begin anew.")] = True,
    skip_errors: Annotated[bool, typer.Option("--skip-errors", help="Leave out rows that cannot be loaded.")] = False,
    max_skipped: Annotated[float | None, typer.Option(help="So many rows may be left out, or a share below 1.")] = None,
    retry_skipped: Annotated[bool, typer.Option("--retry-skipped", help="Try rows again that were left out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and write nothing.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    allow_pickle: options.AllowPickle = False,
    pretrained: options.Pretrained = False,
    random: options.Random = False,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """Write the features of a whole data set to disk. Stopped and called again, it does only what is missing.

    [bold]Examples[/bold]

      torchhook extract timm:vit_tiny_patch16_224 --pretrained --data photos/ --sites blocks.11 --pool mean

      torchhook extract torchvision:resnet18 --weights r18.safetensors --data photos/ -s avgpool --dtype float16
    """
    # First, since a model takes long to load.
    if pool not in (None, "cls", *_POOLS):
        raise Trouble(f"--pool {pool}: use {', '.join(_POOLS)} or cls.")
    if dtype not in (None, *_DTYPES):
        raise Trouble(f"--dtype {dtype}: use {', '.join(_DTYPES)}.")
    transform = None if pool is None else transforms.tokens("cls") if pool == "cls" else transforms.pool(pool)
    _check_data(data)
    wanted = inputs.Options(size=size, mean=mean, std=std)
    inputs.preparation(wanted)
    with console.status(f"loading {model}"):
        net = models.load(model, weights=weights, allow_pickle=allow_pickle, pretrained=pretrained, device=device)
    # Not before: of a name that means no model, nothing is known.
    (models.say_random if random else models.refuse_random)(model, weights, pretrained)
    rows = _data(data, net, model, wanted)
    if isinstance(rows, ImageFolder):
        inputs.say_preparation(counted(len(rows), "image"), rows)
    try:
        found = extract_to(
            net,
            rows,
            sites,
            out,
            batch_size=batch_size,
            transform=transform,
            run_on=device,
            dtype=None if dtype is None else _DTYPES[dtype],
            rows_per_shard=rows_per_shard,
            workers=workers,
            resume=resume,
            on_error="skip" if skip_errors else "raise",
            max_skipped=_number(max_skipped),
            retry_skipped=retry_skipped,
            progress=progress and not json,
            dry_run=dry_run,
        )
    except KeyboardInterrupt:
        _say_kept(out)
        raise
    if isinstance(found, Estimate):
        console.as_json(dataclasses.asdict(found)) if json else print(found)
        return
    _info(found, json)


def _say_kept(out: str) -> None:
    """What an interrupt has not cost."""
    rows, total = kept(out)
    of = "" if total is None else f" of {total:,}"
    console.say(f"stopped: {rows:,}{of} rows are kept in {out}; the same command goes on from there.")


def _number(limit: float | None) -> int | float | None:
    """A count where it is a whole number: a command line has no two ways to write one."""
    return int(limit) if limit is not None and limit == int(limit) and limit != 1.0 else limit


def _check_data(path: Path) -> None:
    """First, since a model takes long to load."""
    if not path.exists():
        raise Trouble(f"--data {path}: there is no such folder or file.")
    if not path.is_dir() and path.suffix != ".safetensors":
        raise Trouble(f"--data {path}: give a folder of images, or a .safetensors with one tensor of rows.")


def _data(path: Path, net: Any, name: str, wanted: inputs.Options) -> Any:
    if path.is_dir():
        return ImageFolder.for_model(path, net, **inputs.preparation_for(name, wanted))
    found = inputs.load(inputs.Options(file=path), net, "").x
    if isinstance(found, torch.Tensor):
        return found
    raise Trouble(f"{path} holds {counted(len(found), 'tensor')}; data is one tensor of rows.")


@features.command("info")
def info(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A feature store.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Say what is in a store."""
    # One asks this of a store that is being made, too; export below wants all of its rows.
    _info(open_features(path, incomplete=True), json)


def _info(found: Features, json: bool) -> None:
    if json:
        rows = {name: {"shape": list(found[name].shape), "dtype": str(found[name].dtype)} for name in found}
        about = {"rows": len(found), "bytes": found.nbytes, "missing_shards": found.missing, "skipped": found.skipped}
        images = {"preparation": found.manifest.about.get("preparation"), "classes": found.classes}
        console.as_json({"path": found.path, **about, **images, "sites": rows})
    else:
        shown = found.table()
        shown.notes = [spoken(note) for note in shown.notes]
        console.table(shown)


@features.command("verify")
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A feature store.", show_default=False)],
    discard: Annotated[bool, typer.Option("--discard", help="Delete broken shards, for extract to redo.")] = False,
    json: options.Json = False,
) -> None:
    """Read every byte; exit code 1 if something is missing or altered."""
    with console.status(f"reading {path}"):
        found = verify_store(path)
    # The exit code stays 1 afterwards: what was deleted is missing until extract has made it again.
    gone = found.discard() if discard else []
    if json:
        problems = [problem._asdict() for problem in found.problems]
        console.as_json({"ok": found.ok, "shards": found.shards, "problems": problems, "discarded": gone})
    else:
        # It advises in Python, for those who called it there.
        print(spoken(str(found)))
        if gone:
            console.say(f"deleted {len(gone)} broken {plural(len(gone), 'shard')}.")
    raise typer.Exit(0 if found.ok else 1)


@features.command("export")
def export(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A feature store.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the .npy files.")] = Path("export"),
    sites: Annotated[
        list[str] | None, typer.Option("--sites", "-s", help="One that `features info` lists. Repeatable.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write .npy files, one for each site."""
    with console.status(f"exporting {path}"):
        written = open_features(path).export(out, sites or None)
    console.as_json(written) if json else print("\n".join(written))
