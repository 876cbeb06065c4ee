"""The pages of the documentation, and what runs in them.

A block marked ``python`` runs, all blocks of a page in order and with the same names; one marked ``console`` is
commands after a ``$``, of ``torchhook`` or ``echo $?``. A block marked ``text`` right below is what it prints.
``python -m tests.documentation docs/selectors.md`` writes down what the blocks of a page print now.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(
    r"^```(?P<kind>python|console)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A block that runs, where its code begins, and what the page says it prints, if it says so."""

    code: str
    line: int
    output: str | None
    kind: str = "python"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    return [
        Block(found["code"], text.count("\n", 0, found.start("code")), found["output"], found["kind"])
        for found in _FENCE.finditer(text)
    ]


def printed(page: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page, and give each with what it printed."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if block.kind == "console":
                _typed(block.code, out)
            else:
                # Empty lines before the code: an error then names the line of the page.
                exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
        yield block, _trimmed(out.getvalue())


def _typed(text: str, out: io.StringIO) -> None:
    """Run commands as they are typed, what they say on stderr with what they print."""
    from torchhook._cli.api import main as torchhook  # not before: only one page has commands

    code, paths = 0, sys.path.copy()
    for line in text.splitlines():
        prompt, command, *arguments = shlex.split(line)
        assert (prompt, command) in (("$", "torchhook"), ("$", "echo")), line
        if command == "echo":
            assert arguments == ["$?"], line
            print(code)
            continue
        with contextlib.redirect_stderr(out):
            try:
                torchhook(arguments)
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.path[:] = paths  # the command looks for modules where it is called


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def rewrite(page: Path, outputs: list[str]) -> None:
    """Put what the blocks printed into the page, where it shows what they print."""
    left = iter(outputs)

    def replaced(found: re.Match[str]) -> str:
        new = next(left)
        code = found["code"]
        return found[0] if found["output"] is None else f"```{found['kind']}\n{code}```\n\n```text\n{new}```\n"

    page.write_text(_FENCE.sub(replaced, page.read_text()))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as Python-Markdown names them."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)) for title in titles)
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in plain}


def links(page: Path) -> list[str]:
    """Where a page links to, beside the web."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def main(names: list[str]) -> None:
    """Write down what the blocks of pages print."""
    import torch

    from tests import conftest  # noqa: F401  (torchvision beside a CPU build of torch)

    warnings.simplefilter("error")
    for page in [Path(name).resolve() for name in names]:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            results = [text for _, text in printed(page)]
            os.chdir(ROOT)
        rewrite(page, results)
        print(f"{name_of(page)}: {len(results)} blocks")


if __name__ == "__main__":
    main(sys.argv[1:])
