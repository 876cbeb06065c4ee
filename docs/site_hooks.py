"""What MkDocs does not do by itself: links out of the folder, notebooks as files, ``llms.txt``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:tests|src|benchmarks|examples)(?:/[^)]*)?)\)")
_NOTEBOOK = re.compile(r"\]\((?:\.\./)((?:\.\./)*)examples/([^)/]+\.ipynb)\)")
_LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_TEXT = r"\1"
_OPTION = re.compile(r"<code>(-[^<\n]{1,24})</code>")
_pages: dict[str, tuple[str, str]] = {}


def on_files(files: Any, config: Any) -> Any:
    """The notebooks can be downloaded from the site."""
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to notebooks lead to those of the site; other files of the repository are not there: their text stays."""
    markdown = _NOTEBOOK.sub(r"](\1notebooks/\2)", markdown)
    markdown = _LINK.sub(r"\1", markdown)
    shown = markdown
    for name in re.findall(r'^--8<-- "(.*)"$', markdown, re.MULTILINE):
        shown = shown.replace(f'--8<-- "{name}"', (ROOT / name).read_text())
    title = re.search(r"^# (.*)$", shown, re.MULTILINE)
    _pages[page.url] = title[1] if title else page.file.name, shown
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Messages are long lines of prose, and wrap; the tree of errors is a picture, and does not.

    Options of the command stay in one piece: a line may end after a hyphen, which cuts ``--stop`` in two.
    """
    html = _OPTION.sub(r'<code class="option">\1</code>', html)
    one = page.file.src_uri.startswith("errors/") and not page.is_index
    return f'<div class="messages">{html}</div>' if one else html


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """The order of pages is that of the navigation."""
    _pages.clear()
    _pages.update({page.url: ("", "") for page in nav.pages})


def on_post_build(config: Any) -> None:
    """An index for programs that read documentation, and the text of all pages in one file."""
    site = Path(config.site_dir)
    head = f"# {config.site_name}\n\n> {config.site_description}\n\n"
    lines = [f"- [{title}]({url}){_first_sentence(text)}" for url, (title, text) in _pages.items()]
    index = head + "All pages in one file: llms-full.txt\n\n## Pages\n\n" + "\n".join(lines) + "\n"
    (site / "llms.txt").write_text(index)
    whole = head + "\n\n".join(f"<!-- {url} -->\n\n{text}" for url, (_, text) in _pages.items())
    (site / "llms-full.txt").write_text(whole)


def _first_sentence(text: str) -> str:
    prose = [part for part in re.split(r"\n\s*\n", text) if re.match(r"[A-Z`*]", part)]
    found = re.match(r".*?\.(?=\s|$)", re.sub(r"\s+", " ", prose[0])) if prose else None
    return f": {_LINKED.sub(_TEXT, found[0])}" if found else ""
