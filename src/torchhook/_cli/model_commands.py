"""``layers``, ``run``, ``report`` and ``diff``: one model, one input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from torchhook._cam.api import METHODS, known_method
from torchhook._capture import Stopped
from torchhook._capture import run as run_once
from torchhook._cli import console, inputs, models, options
from torchhook._cli.errors import Trouble
from torchhook._core.calling import arguments
from torchhook._core.index import glob_pattern
from torchhook._diff.api import diff as compare
from torchhook._layers.api import COLUMNS, chosen
from torchhook._layers.api import layers as list_layers
from torchhook._recording import arrays, saving
from torchhook._recording.address import parse
from torchhook._recording.differences import Diff
from torchhook._report.api import page_at
from torchhook._report.api import report as write_report
from torchhook._values.tree import describe
from torchhook.errors import suggestion


# Typer makes the options from the signature, and evaluates its annotations: what commands share is shared as types, and
# these imports are needed at run time.
def layers(
    model: options.Model,
    depth: Annotated[int | None, typer.Option(help="Levels below the model; all of them if left out.")] = None,
    columns: Annotated[
        str | None, typer.Option(help=f"What to show, with commas between: {', '.join(COLUMNS)}; or all.")
    ] = None,
    file: options.File = None,
    text: options.Text = None,
    tokens: options.Tokens = None,
    shape: options.Shape = None,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    allow_pickle: options.AllowPickle = False,
    pretrained: options.Pretrained = False,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """List the layers of a model; with an input, their output shapes too.

    [bold]Examples[/bold]

      torchhook layers torchvision:resnet18 --depth 2

      torchhook layers timm:vit_tiny_patch16_224 --shape 1x3x224x224 --columns type,output,multiply_adds,time

      torchhook layers transformers:./my-gpt2 --tokens 464,2068,7586,21831

      torchhook layers mypackage.nets:build --json | jq '.[].name'
    """
    wanted = inputs.Options(file, text, shape, size, mean, std, tokens=tokens)
    inputs.preparation(wanted)
    shown = columns if columns in (None, "all") else [part.strip() for part in columns.split(",")]
    chosen(shown, wanted.given)  # before the model is loaded: a typo is told at once
    net = _model(model, weights, allow_pickle, pretrained, device, silent=True)  # shapes are those of any weights
    given = inputs.load(wanted, net, model).x if wanted.given else None
    with console.status(f"looking at {model}"):
        found = list_layers(net, given, depth=depth, columns=shown)
    if json:
        console.as_json([layer._asdict() for layer in found])
    else:
        console.table(found.table())


def run(
    model: options.Model,
    sites: options.Sites = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the recording as .safetensors.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the forward pass at the last captured site.")] = False,
    file: options.File = None,
    text: options.Text = None,
    tokens: options.Tokens = None,
    shape: options.Shape = None,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    allow_pickle: options.AllowPickle = False,
    pretrained: options.Pretrained = False,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """Run a model once and record what passes the layers.

    [bold]Examples[/bold]

      torchhook run torchvision:resnet18 -s 'layer*' -s fc:input --input cat.jpg -o cat.safetensors

      torchhook run timm:vit_tiny_patch16_224 -s 'blocks.*.attn' --shape 1x3x224x224 --json
    """
    if out is not None:  # not after the run, which may take minutes
        saving.named(out)
    _refuse_gradients("run", sites)
    wanted = inputs.Options(file, text, shape, size, mean, std, tokens=tokens)
    inputs.preparation(wanted)
    net = _model(model, weights, allow_pickle, pretrained, device)
    args, kwargs = arguments(inputs.load(wanted, net, model).x)
    # Kept on the CPU: a recording of every layer may be many times as large as the model.
    with console.status(f"running {model}"), torch.no_grad():
        output, recording = run_once(net, *args, capture=sites, stop=stop, kwargs=kwargs, device="cpu")
    saved = None if out is None else recording.save(out)
    if json:
        records = [
            {"site": str(r.site), "call": r.call, "shape": r.text, "dtype": r.dtype, "bytes": r.nbytes}
            for r in recording.records()
        ]
        shown = None if isinstance(output, Stopped) else describe(output)
        console.as_json({"output": shown, "records": records, "never_ran": recording.missing, "saved": saved})
        return
    console.table(recording.table())
    if saved is not None:
        # Not printed: stdout has the table and nothing else.
        console.say(f"saved to {saved}; th.load({str(saved)!r}) opens it.")


def report(
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    target: Annotated[int | None, typer.Option(help="The class to explain; the most likely if left out.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Class names, one on a line, or JSON.")] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    cam: Annotated[str, typer.Option(help="The method of the class activation map, or 'none'.")] = "gradcam",
    gradients: Annotated[bool, typer.Option(help="Take gradients of the target's score.")] = True,
    attention: Annotated[bool, typer.Option(help="Show attention maps.")] = True,
    file: options.File = None,
    text: options.Text = None,
    tokens: options.Tokens = None,
    shape: options.Shape = None,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    allow_pickle: options.AllowPickle = False,
    pretrained: options.Pretrained = False,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """Write a page about one run: layers, statistics, feature maps, gradients, attention, what looks wrong.

    [bold]Examples[/bold]

      torchhook report torchhook.demo:efficientnet_lite0 --input cat.jpg --mean 0.5 --std 0.5

      torchhook report transformers:./my-bert --text 'Hooks see what passes.' -o bert.html

      torchhook report transformers:./my-gpt2 --tokens 464,2068,7586,21831
    """
    # Before the model is loaded, which may take a minute: a typo is told at once.
    page_at(out)
    method, names = _method(cam), None if labels is None else models.read_classes(labels)
    wanted = inputs.Options(file, text, shape, size, mean, std, tokens=tokens)
    inputs.preparation(wanted)
    net = _model(model, weights, allow_pickle, pretrained, device)
    given = inputs.load(wanted, net, model)
    with console.status(f"running {model}"):
        path = write_report(
            net,
            given.x,
            out,
            target=target,
            tokens=given.tokens,
            labels=names,
            # The name that was asked for says more than the class: resnet18, not ResNet.
            title=title or model.rpartition(":")[2],
            gradients=gradients,
            attention=attention,
            cam=method,
        )
    if json:
        console.as_json({"path": path, "bytes": path.stat().st_size})
    else:
        print(path)


def _method(cam: str) -> str | None:
    try:
        return None if cam == "none" else known_method(cam)
    except ValueError:
        raise Trouble(f"--cam {cam}: use {', '.join(METHODS)} or none.") from None


_SIDE = "A recording or arrays (.safetensors, .npz, .npy), a model, or a program (.pt2)."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    sites: options.Sites = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="What a site or path of A is called in B, as in stem=conv1. Repeatable.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Give each module of B the inputs of A's, so that errors do not add up.")
    ] = False,
    file: options.File = None,
    text: options.Text = None,
    tokens: options.Tokens = None,
    shape: options.Shape = None,
    size: options.Size = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of A.", rich_help_panel="Model")] = None,
    weights_b: Annotated[Path | None, typer.Option(help="Weights of B.", rich_help_panel="Model")] = None,
    allow_pickle: options.AllowPickle = False,
    pretrained: options.Pretrained = False,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """Compare recordings, arrays of other programs, or models on one input, and say where they first part.

    The exit code is 0 if they are the same, 1 if they differ, 2 if they cannot be compared.

    [bold]Examples[/bold]

      torchhook diff before.safetensors after.safetensors

      torchhook diff torchvision:resnet18 onnx_outputs.npz --input x.npy --weights resnet18.safetensors

      torchhook diff torchvision:resnet18 torchvision:resnet18 --shape 1x3x224x224
      --weights before.safetensors --weights-b after.safetensors
    """
    values = [_is_values(side) for side in (a, b)]
    ran: dict[str, Any] = {"input": file, "text": text, "tokens": tokens, "shape": shape}
    ran |= {"size": size, "mean": mean, "std": std, "weights": weights, "weights_b": weights_b}
    # An option that has its default cannot be told from one that was left out.
    more = {"pretrained": pretrained, "local": local, "allow_pickle": allow_pickle, "device": device != "cpu"}
    _refuse(values, **ran, **more)
    if not values[0]:  # a file may hold gradients, and sites are chosen among them
        _refuse_gradients("diff", sites)
    wanted = inputs.Options(file, text, shape, size, mean, std, tokens=tokens)
    inputs.preparation(wanted)
    left, right = (
        side if held else _model(side, of, allow_pickle, pretrained, device)
        for side, held, of in zip((a, b), values, (weights, weights_b), strict=True)
    )
    given = None
    if not all(values):
        # Prepared once, for A where it runs: with an input each, it would be the inputs that differ.
        runs, called = (right, b) if values[0] else (left, a)
        assert isinstance(runs, nn.Module)
        given = inputs.load(wanted, runs, called).x
    with console.status("comparing"):
        # Sites are chosen in A where A runs, and otherwise among what was compared.
        chosen = None if values[0] else sites
        found = compare(left, right, given, sites=chosen, names=_names(name), rtol=rtol, atol=atol, local=local)
    if values[0] and sites is not None:
        found = _only(found, sites)
    _show_diff(found, json)
    raise typer.Exit(0 if found.ok else 1)


def _refuse_gradients(command: str, sites: list[str] | None) -> None:
    """Nothing here calls backward: there is no loss that a command could know."""
    for site in sites or ():
        if parse(site).port.startswith("grad"):
            raise Trouble(
                f"--sites {site}: torchhook {command} computes no gradients, which need a loss: use th.capture(model, "
                f"{site!r}) in Python and call backward in the block."
            )


def _is_values(side: str) -> bool:
    """Whether a side is a file of values; what looks like a file and is none is told, and not taken for a model."""
    path = Path(side)
    if path.suffix in arrays.FILES:
        if not path.is_file():
            raise Trouble(f"no file {side}.")
        return True
    if path.is_file() and path.suffix != ".pt2":
        raise Trouble(
            f"{side} is no file that diff reads: expected a recording or arrays ({', '.join(arrays.FILES)}), or a "
            "program (.pt2). Of a model's weights say --weights."
        )
    return False


def _names(given: list[str] | None) -> dict[str, str | None] | None:
    if given is None:
        return None
    pairs = [text.partition("=") for text in given]
    for here, equals, _ in pairs:
        if not (here and equals):
            raise Trouble(
                f"--name {here}: give A=B, a path or address of A and what it is called in B; A= leaves it out."
            )
    return {here: there or None for here, _, there in pairs}


def _refuse(values: list[bool], **given: Any) -> None:
    """What holds values is compared as it is: options of a run mean nothing there."""
    if not any(values):
        return
    meaningless = {"local"} | ({"weights"} if values[0] else set()) | ({"weights_b"} if values[1] else set())
    if all(values):
        meaningless = set(given)
    needless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value and name in meaningless]
    if needless:
        what = (
            "two files of values are compared as they are" if all(values) else "a file of values is compared as it is"
        )
        raise Trouble(f"{what}, without a run: leave out {', '.join(needless)}.")


def _only(found: Diff, wanted: list[str]) -> Diff:
    """The rows whose address, or path, or all its calls, a text or glob means."""
    for address in wanted:
        if not any(_means(address, row.site) for row in found):
            raise Trouble(f"--sites {address} matches nothing. {suggestion(address, [row.site for row in found])}")
    kept = [row for row in found if any(_means(address, row.site) for address in wanted)]
    return Diff(kept, found.title, found.notes)


def _means(wanted: str, address: str) -> bool:
    if wanted == address:
        return True
    asked, site = parse(wanted), parse(address)
    # Who gives no call means all of them.
    if asked.call is None:
        site = site.every_call
    # The pattern has a dot after every component, so the path needs one too.
    return asked.but(path="") == site.but(path="") and glob_pattern(asked.path).fullmatch(f"{site.path}.") is not None


def _show_diff(found: Diff, json: bool) -> None:
    if json:
        first = None if found.first is None else found.first.site
        console.as_json({"same": found.ok, "first": first, "rows": [dataclasses.asdict(row) for row in found]})
    else:
        console.table(found.table())


def _model(
    name: str, weights: Any, allow_pickle: bool, pretrained: bool, device: str, *, silent: bool = False
) -> nn.Module:
    with console.status(f"loading {name}"):
        net = models.load(name, weights=weights, allow_pickle=allow_pickle, pretrained=pretrained, device=device)
    # Not before: of a name that means no model, nothing is known.
    if not silent:
        models.say_random(name, weights, pretrained)
    return net
