"""Every example in the documentation runs and prints what the page says; links lead somewhere; tables are true."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests import documentation
from tests.distributed.torch26 import repair_fsdp2
from tests.documentation import DOCS, PAGES, ROOT, blocks, headings, links, name_of, printed
from torchhook import errors

# Lists of other pages, tables made elsewhere, and what the site puts together itself.
WITHOUT_EXAMPLES = {
    "docs/recipes/index.md",
    "docs/errors/index.md",
    "docs/coming-from/index.md",
    "docs/benchmarks.md",
    "docs/glossary.md",
    "docs/limits.md",
    "docs/notebooks.md",
    *(name_of(page) for page in (DOCS / "api").glob("*.md")),
}
# Those that import another library, run a large network, or start another Python.
SLOW = {
    "docs/index.md",
    "docs/command.md",
    "docs/coming-from/grad-cam.md",
    "docs/recipes/distillation.md",
    "docs/recipes/many-machines.md",
    "docs/errors/TorchVersionError.md",
    "docs/errors/TorchVersionWarning.md",
}
RUNNING = [page for page in PAGES if name_of(page) not in WITHOUT_EXAMPLES]


# What they show of programs needs that; docs/compatibility.md has what older versions cannot do.
_old_torchcam = pytest.mark.skipif(
    metadata.version("torchcam").startswith("0.3"),
    reason="on Python 3.10 there is no newer torchcam that goes with the others: it is no context manager yet",
)
NEED_TORCH_2_9 = {"docs/command.md", "docs/compiled.md", "docs/debugging.md"}
_too_old = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9), reason="what it shows of programs needs 2.9"
)


def _marked(page: Path) -> object:
    marks = [pytest.mark.slow] if name_of(page) in SLOW else []
    marks = marks + [_too_old] * (name_of(page) in NEED_TORCH_2_9) + [_old_torchcam] * (page.stem == "torchcam")
    return pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # of torch.export.unflatten about itself
@pytest.mark.parametrize("page", [_marked(page) for page in RUNNING])
def test_the_examples_of_a_page_run_in_order_and_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Programs that an example starts find the library where this process does.
    monkeypatch.setenv("PYTHONPATH", str(Path(th.__file__).parent.parent), prepend=os.pathsep)
    if page.stem == "CompiledWarning":  # said once in a process, which other tests have used up
        monkeypatch.setattr(importlib.import_module("torchhook._core.hooks").eager_stance, "said", False)
    if page.stem == "sharded":  # its ranks are CPUs, which torch 2.6 alone does not shard over
        repair_fsdp2()
    torch.manual_seed(0)
    assert blocks(page.read_text()), f"{page.name} shows no example"
    for block, found in printed(page):
        assert block.output is None or found == block.output, f"{name_of(page)}, line {block.line + 1}"


def test_pages_without_examples_are_pages() -> None:
    known = {name_of(page) for page in PAGES}
    assert known >= WITHOUT_EXAMPLES | SLOW
    assert not [name for name in WITHOUT_EXAMPLES if blocks((ROOT / name).read_text())]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in headings(target), f"{name_of(page)}: {link}"


def test_every_page_is_in_the_navigation_and_nothing_else_is() -> None:
    navigation = re.search(r"^nav:\n(.*)", (ROOT / "mkdocs.yml").read_text(), re.DOTALL | re.MULTILINE)
    assert navigation is not None
    listed = re.findall(r"(\S+\.md)$", navigation[1], re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_the_front_page_names_this_version_and_the_oldest_ones_that_do() -> None:
    page = (ROOT / "README.md").read_text()
    settings = (ROOT / "pyproject.toml").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', settings)
    library = re.search(r'"torch>=([\d.]+)', settings)
    assert python is not None
    assert library is not None
    assert f"Version {th.__version__} · Python {python[1]} and torch {library[1]}, or newer" in page


def test_the_start_page_agrees_with_the_front_page() -> None:
    front, start = (path.read_text() for path in (ROOT / "README.md", DOCS / "index.md"))
    with_output = {(block.code, block.output) for block in blocks(start) if block.output}
    [guard] = [block for block in blocks(front) if "th.guard" in block.code]
    assert (guard.code, guard.output) in with_output
    outputs = {output for _, output in with_output}
    assert {block.output for block in blocks(front) if block.output} <= outputs
    commands = re.findall(r"^(pip install \S+) +#", start, re.MULTILINE)
    assert len(commands) == 3
    assert all(command in front for command in commands)


def test_every_error_has_a_page_that_says_when_it_is_raised() -> None:
    for name in errors.__all__:
        text = (DOCS / "errors" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert "## What to do" in text
        assert any(block.output for block in blocks(text)), name
    listed = set(re.findall(r"\]\((\w+)\.md\)", (DOCS / "errors" / "index.md").read_text()))
    assert listed == set(errors.__all__)


def test_the_tree_of_errors_is_that_of_the_module() -> None:
    assert errors.__doc__ is not None
    # Indented, so that the reference shows it as it stands.
    tree = textwrap.dedent(errors.__doc__.partition(":\n\n")[2]).strip()
    assert f"```text\n{tree}\n```" in (DOCS / "errors" / "index.md").read_text()


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"^::: torchhook\.(\S+)$", text, re.MULTILINE))
    modules = {name for name in th.__all__ if inspect.ismodule(getattr(th, name))}
    assert set(th.__all__) - modules - {"__version__"} <= listed
    for name in modules - {"errors", "transforms"}:  # these two are shown as a whole
        assert {f"{name}.{member}" for member in getattr(th, name).__all__} <= listed, name
    assert {"errors", "transforms"} <= listed


CLASSIC = [
    (th.HookManager, ["model", "max_size"]),
    (th.FeatureLayer, ["model", "paths", "feature_layer_path"]),
    (th.FeatureLayers, ["model", "paths", "feature_layer_paths"]),
    (th.FeatureExtractor, ["model", "paths", "layer_names"]),
    (th.VerboseExecution, ["model", "depth", "dtype", "time", "print"]),
    (th.Hook, ["module_name", "features_in_hook", "features_out_hook"]),
]


@pytest.mark.parametrize(("kind", "attributes"), CLASSIC, ids=[kind.__name__ for kind, _ in CLASSIC])
def test_the_page_of_classic_names_has_every_attribute(kind: type, attributes: list[str]) -> None:
    text = (DOCS / "classic.md").read_text()
    own = [base for base in kind.__mro__ if base.__module__.startswith("torchhook")]
    methods = {name for base in own for name in vars(base) if not name.startswith("_")}
    parameters = set(inspect.signature(kind.__init__).parameters) - {"self"}
    for name in {*attributes, *methods, *parameters}:
        assert re.search(rf"\b{name}\b", text), f"{kind.__name__}.{name}"


# -- the table of modes ------------------------------------------------------------------------------------


class Modes(nn.Module):
    """A small network that remembers in which mode it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.add(self.training)
        tokens = self.body(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


SEEN: set[bool] = set()
X = torch.zeros(2, 3, 4, 4)


def _capture(model: nn.Module, folder: Path) -> None:
    with th.capture(model, "head"):
        model(X)


def _edit(model: nn.Module, folder: Path) -> None:
    with th.edit(model, {"head": th.edits.zero()}):
        model(X)


def _guard(model: nn.Module, folder: Path) -> None:
    with th.guard(model):
        model(X)


def _watch(model: nn.Module, folder: Path) -> None:
    with th.watch(model, "head", alarms=False):
        model(X)


def _clip(model: nn.Module, folder: Path) -> None:
    with th.clip_gradients(model, 1.0):
        model(X)


def _manager(model: nn.Module, folder: Path) -> None:
    manager = th.HookManager(model)
    manager.add("head")
    model(X)
    manager.clear_hooks()


def _lens(model: nn.Module, folder: Path) -> None:
    # It has no blocks to look at, which is known when it has run.
    with pytest.raises(th.errors.SelectorError, match="no lens"):
        th.lens(model, th.types.Recording(), inputs=X)


RUNS: dict[str, Callable[[nn.Module, Path], object]] = {
    "capture": _capture,
    "edit": _edit,
    "run": lambda model, folder: th.run(model, X, capture="head"),
    "guard": _guard,
    "watch": _watch,
    "clip_gradients": _clip,
    "HookManager": _manager,
    "FeatureLayers": lambda model, folder: th.FeatureLayers(model, ["head"])(X),
    "FeatureLayer": lambda model, folder: th.FeatureLayer(model, "head")(X),
    "FeatureExtractor": lambda model, folder: th.FeatureExtractor(model, ["head"])(X),
    "VerboseExecution": lambda model, folder: th.VerboseExecution(model, print=len)(X),
    "layers": lambda model, folder: th.layers(model, X),
    "ops": lambda model, folder: th.ops(model, X),
    "attention": lambda model, folder: th.attention(model, X),
    "cam": lambda model, folder: th.cam(model, X, 0, "body"),
    "report": lambda model, folder: th.report(model, X, folder / "report.html", repeats=1),
    "diff": lambda model, folder: th.diff(model, model, X),
    "sweep": lambda model, folder: th.sweep(
        model, X, X + 1, lambda output: output[0, 0], sites="body", dim=None, progress=False
    ),
    "roles": lambda model, folder: th.roles(model, X),
    "lens": _lens,
    "extract": lambda model, folder: th.extract(model, X, "body", folder / "features", progress=False),
    "stream": lambda model, folder: list(
        th.stream(model, X, "attention", transform=lambda out: out[0], buffer=64, batch=8)
    ),
    "statistics": lambda model, folder: th.statistics(model, X, "head"),
}


def _table_of_modes() -> dict[str, str]:
    rows = re.findall(r"^\| (`th\..*?) \| (.*?) \|", (DOCS / "modes.md").read_text(), re.MULTILINE)
    return {name: mode for names, mode in rows for name in re.findall(r"`th\.(\w+)", names)}


def test_the_table_of_modes_has_every_function_that_runs_a_model() -> None:
    assert _table_of_modes().keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_a_function_runs_the_model_in_the_mode_that_the_table_says(name: str, tmp_path: Path) -> None:
    model = Modes().train()
    SEEN.clear()
    RUNS[name](model, tmp_path)
    evaluates = _table_of_modes()[name].startswith("evaluation")
    assert {not evaluates} == SEEN
    assert all(module.training for module in model.modules())


# -- the site ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    assert not [page for page in pages if not (site / page).exists()]
    # In a checkout these links lead to the examples.
    notebooks = re.findall(r'href="(notebooks/[^"]+\.ipynb)"', (site / "notebooks.html").read_text())
    assert len(notebooks) == len(list((ROOT / "examples").glob("*.ipynb")))
    assert all((site / notebook).exists() for notebook in notebooks)
    # Nothing comes from the web: the site is read where there is none.
    loaded = [
        address
        for page in site.rglob("*.html")
        for address in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
    ]
    assert not loaded
    index = (site / "llms.txt").read_text()
    assert all(str(page) in index for page in pages)
    assert "th.capture(model" in (site / "llms-full.txt").read_text()


def test_what_a_block_prints_is_written_into_the_page_where_it_shows_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nprint(5)\n```\n")
    [first, second] = printed(page)
    assert (first[0].output, first[1], second[0].output, second[1]) == ("3\n", "2\n", None, "5\n")
    documentation.rewrite(page, [first[1], second[1]])
    assert page.read_text() == "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\n```python\nprint(5)\n```\n"


def test_commands_of_a_page_run_too_and_what_they_say_on_stderr_is_part_of_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ torchhook layers nowhere:net\n$ echo $?\n```\n\n```text\n0\n```\n")
    [(block, found)] = printed(page)
    assert (block.kind, block.output) == ("console", "0\n")
    first, last = found.splitlines()
    assert first.startswith("torchhook: no Python module 'nowhere'")
    assert last == "2"
    documentation.rewrite(page, [found])
    assert page.read_text() == (f"```console\n$ torchhook layers nowhere:net\n$ echo $?\n```\n\n```text\n{found}```\n")


def test_the_page_of_the_command_has_every_command_and_option_of_an_input() -> None:
    text = (DOCS / "command.md").read_text()
    app = importlib.import_module("torchhook._cli.api").app
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(names) > 5
    assert [name for name in names if f"`torchhook {name}" not in text] == []
    stores = importlib.import_module("torchhook._cli.store_commands").features
    assert [command.name for command in stores.registered_commands if f"`{command.name}`" not in text] == []
    options = ["input", "text", "tokens", "shape", "size", "mean", "std", "weights", "allow-pickle", "pretrained"]
    assert [option for option in options if f"--{option}" not in text] == []
