"""Write ``benchmarks/README.md`` from the JSON in ``results/``, and from what ``where_the_time_goes.md`` says.

The lines with numbers in the table of the front page are written too.

python benchmarks/write_readme.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import ROOT, Row, goal, shown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
WORDS = HERE / "where_the_time_goes.md"
FRONT = ROOT / "README.md"

INTRODUCTION = """# Benchmarks

<!-- Made by write_readme.py from results/*.json and where_the_time_goes.md: edit those. -->

`make bench` runs what needs no GPU, prints tables, writes `results/*.json` and this page. On a GPU:
`PYTHONPATH=src python benchmarks/gpu.py --json benchmarks/results/gpu.json`, then `python benchmarks/write_readme.py`.

Every figure is a ratio, measured side by side in one run: the ways take turns, in a new order each round, and medians
are compared; half of the rounds lie between the two numbers beside a ratio. *Wrong values* are judged by bare PyTorch
hooks that do `.detach().clone()`; a value that was overwritten in place before anybody could read it is wrong. A peer
that fails is shown with its own message, shortened.

| program | what it shows |
|---|---|
| `capture.py` | values, beside bare hooks and the peers; what must hold on a CPU (`limits.py`); peak memory |
| `growth.py` | what one more site, call or session costs |
| `cam.py` | class activation maps, beside grad-cam and torchcam |
| `features.py` | a data set's features to disk, beside what is written by hand and Hugging Face's `map` |
| `extract.py` | the same against its bounds (forward passes, raw write), peak memory, reading |
| `stream.py` | tokens while the model runs, beside its forward passes alone |
| `watch.py`, `guard.py`, `sweep.py` | statistics in training; the first NaN; activation patching |
| `hotspots.py` | where the time goes: functions, Python calls, instructions |
| `gpu.py` | all of it on a CUDA device, in under eight minutes |
"""

TITLES = {
    "gpu": "On a GPU",
    "capture": "Getting at values, on a CPU",
    "growth": "Growth",
    "cam": "Class activation maps",
    "features": "Features to disk, beside other ways",
    "extract": "Extraction and reading, against their bounds",
    "stream": "Streams of tokens",
    "watch": "Watching a training step",
    "guard": "Guarding",
    "sweep": "Activation patching",
}
NOTES = {
    "gpu": "1 is the plain forward pass or step; for what goes to disk, 1 is the slower of the stopped forward passes "
    "and a raw write, and more is better.",
    "capture": "1 is the plain forward pass (with gradients: forward and backward), in processor time on one core; "
    "each way has a process of its own. In brackets: how many of the values that came are wrong. *One*, *few* and "
    "*all* are the sites asked for; *per call* opens and closes for each call, *held* stays open.\n\n"
    "torchvision's extractor leaves out what comes after the last site, and captum's gradients those of the "
    "parameters, so that they can be below 1. Where a block and the layer that it ends with are both asked for, one "
    "node of the extractor answers one of them, and the other gets the node before: the wrong ones of ViT are of this "
    "kind, and right when asked for alone; those of ResNet-18 were overwritten.",
    "features": "1 is the forward passes alone, and more is better.",
    "cam": "1 is a forward and a backward pass of the plain model, through all of its layers.",
    "growth": "Lines by least squares, in processor time.",
    "extract": "To disk, 1 is the bound, the slower of the forward passes and a raw write, and more is better. Memory "
    "and reading are ratios to what each line names after the slash.",
    "stream": "1 is the forward passes alone, to the last site and over the same loader; more is better.",
    "sweep": "The loop written by hand is 1.",
    "watch": "The plain training step is 1.",
    "guard": "The plain step is 1.",
}


def readme() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, title in TITLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(section(name, title, json.loads(path.read_text())))
    parts.append("## Where the time goes\n\n" + (WORDS.read_text().strip() if WORDS.exists() else ""))
    path = RESULTS / "hotspots.json"
    if path.exists():
        parts.append(hotspots(json.loads(path.read_text())))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(name: str, title: str, found: dict[str, Any]) -> str:
    parts = [f"## {title}", NOTES.get(name, "")]
    rows = [Row(**row) for row in found["rows"]] if "rows" in found else None
    if rows is None:
        parts += list(foreign(found.get("found", found)))
    else:
        parts += list(plain_tables([row for row in rows if not row.column]))
        parts += list(pivots([row for row in rows if row.column]))
        parts += ["\n".join(f"- {fact}" for fact in found.get("facts", []))]
    parts.append(origin(found.get("environment")))
    return "\n\n".join(part for part in parts if part)


def plain_tables(rows: list[Row]) -> Iterator[str]:
    """One table for each piece of work, its ways below each other."""
    for work in dict.fromkeys(row.work for row in rows):
        mine = [row for row in rows if row.work == work]
        # Columns in which nothing stands are left out.
        cells = [[*row.cells()[:2], between(row), *row.cells()[2:]] for row in mine]
        heads = ["way", "ratio", "half of the rounds", "must reach", "aim", "verdict", "wrong values", "note"]
        used = [place for place in range(len(heads)) if place < 2 or any(line[place] for line in cells)]
        yield bold(work) + table([heads[p] for p in used], [[line[p] for p in used] for line in cells])


def between(row: Row) -> str:
    """Where half of the rounds are; nothing for what the others are compared with."""
    return "" if row.low is None or row.high is None or row.low == row.high else f"{shown(row.low)}–{shown(row.high)}"


def pivots(rows: list[Row]) -> Iterator[str]:
    """One table for each model: a line for each way, a column for each number of sites and mode."""
    for work in dict.fromkeys(row.work for row in rows):
        mine = [row for row in rows if row.work == work]
        columns = sorted(dict.fromkeys(row.column for row in mine), key=_order)
        lines, said = [], []
        for way in dict.fromkeys(row.way for row in mine):
            cells = {row.column: cell(row) for row in mine if row.way == way}
            lines.append([way, *(cells.get(column, "") for column in columns)])
            notes = dict.fromkeys(row.note for row in mine if row.way == way and row.ratio is None and row.note)
            said += [f"{way}: {note}" for note in notes]
        text = bold(work) + table(["way", *columns], lines)
        yield text + ("\n\n" + "\n".join(f"- {note}" for note in said) if said else "")


def _order(column: str) -> tuple[int, int]:
    sites, mode = column.split(", ")
    return ["per call", "held", "gradients"].index(mode), ["one", "few", "all"].index(sites)


def cell(row: Row) -> str:
    """The ratio, and how many are wrong: loudly where any is."""
    if row.ratio is None:
        return "fails"
    wrong = f" (**{row.wrong} of {row.values} wrong**)" if row.wrong else f" (0 of {row.values})"
    return shown(row.ratio) + (wrong if row.values is not None else "")


def foreign(found: dict[str, Any]) -> Iterator[str]:
    """Tables of programs that have their own form: lists of results, or ratios by name, perhaps by table."""
    if isinstance(found.get("results"), list):
        results = found["results"]
        left_out = ("notes", "milliseconds")
        heads = [head for head in results[0] if head not in left_out and "(s)" not in head]
        heads = [head for head in heads if any(result.get(head) is not None for result in results)]
        lines = [[_number(result.get(head)) for head in heads] for result in results]
        yield table([head.replace("_", " ") for head in heads], lines)
        return
    flat = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    if flat:
        yield table(["", "ratio"], [[name, _number(value)] for name, value in flat.items()])
    for name, values in found.items():
        if isinstance(values, dict) and all(isinstance(value, (int, float)) for value in values.values()):
            lines = [[way, _number(value)] for way, value in values.items()]
            kind = "ratio" if any(isinstance(value, float) for value in values.values()) else "count"
            yield bold(name) + table(["", kind], lines)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return shown(value) if value >= 0.001 or value == 0 else f"{value:.1e}"
    return "" if value is None else str(value)


def bold(title: str) -> str:
    """A line above a table; an asterisk in it is one that is meant."""
    return "**" + title.replace("*", "\\*") + "**\n\n"


def table(heads: list[str], lines: list[list[str]]) -> str:
    def text(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([text(heads), "|" + "---|" * len(heads), *(text(line) for line in lines)])


def origin(environment: dict[str, Any] | None) -> str:
    """The machine, the versions and the commit that the figures are from."""
    if environment is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    machine, python, commit = (environment[name] for name in ("machine", "python", "commit"))
    return f"<sub>{machine}; Python {python}; {versions}; commit {commit}.</sub>"


def hotspots(found: dict[str, Any]) -> str:
    parts = []
    lines = []
    for name, facts in found["situations"].items():
        ours, beside = facts["python_calls_per_site"], facts["python_calls_per_site_beside"]
        counted = "instructions_ours" in facts
        ratio = shown(facts["instructions_ours"] / facts["instructions_beside"]) if counted else ""
        lines.append([name, goal(ours), goal(beside), ratio])
    heads = ["100 small layers", "Python calls for each site", "beside", "instructions, beside = 1"]
    parts.append(table(heads, lines))
    phases = found.get("phases", {})
    columns = list(dict.fromkeys(what for parts_of in phases.values() for what in parts_of))
    if phases:
        lines = [
            [way, *(shown(parts_of[c]) if c in parts_of else "" for c in columns)] for way, parts_of in phases.items()
        ]
        parts.append("One call of 100 layers, the plain call = 1\n\n" + table(["", *columns], lines))
    for name, facts in found["situations"].items():
        top = [[place, f"{share:.1%}"] for place, share in facts["shares"]]
        parts.append(f"**{name[0].upper()}{name[1:]}**, shares of own time\n\n" + table(["function", "share"], top))
    return "\n\n".join([*parts, origin(found.get("environment"))])


# -- the table of the front page -----------------------------------------------------------------------------------

COMPARED = [
    "torchhook",
    "bare hooks, clone",
    "TorchHook 0.2.7",
    "torchvision fx",
    "captum LayerActivation",
    "nnsight",
]
STAGES = "ResNet-50 b64, six stages kept on the GPU"
HOST = "ResNet-50 b64, six stages to the host, four batches in a row"
MODULES = "GPT-2 medium, all modules kept on the GPU"
LARGE = "Llama of 6.6 billion parameters, 8x1024 tokens, 32 blocks"
ON_A_GPU = {
    "ResNet-50, six stages kept on the GPU": (STAGES, "session per call", "clone"),
    "ResNet-50, six stages to the host, batch after batch": (HOST, "session per call, device='cpu'", ".cpu()"),
    "GPT-2 medium, all 294 modules kept on the GPU": (MODULES, "session per call", "clone"),
    "a decoder of 6.6 billion parameters, 32 blocks (2.1 GB) kept on the GPU": (
        LARGE,
        "kept on the GPU, session per call",
        "clone",
    ),
    "the same, to the host": (LARGE, "device='cpu', session per call", ".cpu()"),
}


def front(text: str) -> str:
    """The front page with the numbers of the results in the lines of its tables that have numbers."""
    lines = text.splitlines()
    for title, cells in measured().items():
        [place] = [n for n, line in enumerate(lines) if line.startswith(f"| {title} |")]
        lines[place] = "| " + " | ".join([title, *cells]) + " |"
    return "\n".join(lines) + "\n"


def measured() -> dict[str, list[str]]:
    """Those lines, by their titles."""
    rows = _rows("capture")
    resnet = [_all_layers(rows, "ResNet-18", way) for way in COMPARED]
    small = [_all_layers(rows, "100 small layers", way) for way in COMPARED]
    found = {
        "wrong values, all layers of ResNet-18": [f"{row.wrong} of {row.values}" if row else "" for row in resnet],
        "cost, all layers of ResNet-18": [_ratio(row) for row in resnet],
        "cost, 100 tiny layers": [_ratio(row) for row in small],
    }
    rows = _rows("gpu")
    for title, (work, ours, bare) in ON_A_GPU.items():
        beside = _ratio(_gpu(rows, work, f"bare hooks, {bare}"))
        found[title] = [_ratio(_gpu(rows, work, ours)), f"{beside} by `.{bare.strip('.()')}()`"]
    return found


def _rows(name: str) -> list[Row]:
    return [Row(**row) for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]]


def _all_layers(rows: list[Row], work: str, way: str) -> Row | None:
    """For each call, or for a way that has only that, held."""
    mine = {row.column: row for row in rows if (row.work, row.way) == (work, way) and row.ratio is not None}
    return mine.get("all, per call") or mine.get("all, held")


def _gpu(rows: list[Row], work: str, way: str) -> Row | None:
    return next((row for row in rows if (row.work, row.way) == (work, way)), None)


def _ratio(row: Row | None) -> str:
    """Two decimals are enough for a first look."""
    return "" if row is None or row.ratio is None else f"{row.ratio:.2f}" if row.ratio < 20 else f"{row.ratio:.0f}"


def main() -> None:
    README.write_text(readme())
    FRONT.write_text(front(FRONT.read_text()))
    print(f"wrote {README} and the numbers in {FRONT}")


if __name__ == "__main__":
    main()
