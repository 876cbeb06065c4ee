"""What ``report`` returns: the path of the page, which a notebook shows as the page itself."""

from __future__ import annotations

import html
import os
import sys
from pathlib import Path
from typing import Any

# Before Python 3.12, Path is made into one of these by its constructor, and cannot be derived from.
if sys.platform == "win32":
    from pathlib import WindowsPath as _Native
else:
    from pathlib import PosixPath as _Native

_LARGEST = 20_000_000
"""Bytes of a page that go into a notebook; a larger one would make it slow to open and to save."""


class PagePath(_Native):
    """The path of a page, like any other path; in a notebook the page itself is shown.

    >>> path = PagePath("report.html")
    >>> path == Path("report.html"), str(path), path.with_suffix(".pdf").name
    (True, 'report.html', 'report.pdf')
    """

    # What is next to it is a path like any other (Python 3.12 asks this; before, see ``_repr_html_``).
    def with_segments(self, *segments: Any) -> Path:
        return Path(*segments)

    def __reduce__(self) -> Any:
        return type(self), (str(self),)

    def _repr_html_(self) -> str | None:
        if self.suffix not in (".html", ".htm") or not self.is_file():
            return None  # a folder above it, or a page that is gone: shown as a path
        if self.stat().st_size > _LARGEST:
            return f'<div class="torchhook"><a href="{html.escape(self.as_posix())}">{html.escape(str(self))}</a></div>'
        # The page inside the notebook, and not its address: notebooks are moved, and some show no files of the disk.
        page = html.escape(self.read_text("utf-8"))
        return (
            f'<iframe class="torchhook" srcdoc="{page}" title="{html.escape(self.name)}" loading="lazy" '
            'style="width:100%;height:720px;border:1px solid #8884;border-radius:6px"></iframe>'
        )


def page_at(out: str | os.PathLike[str]) -> PagePath:
    """Where a page is to be written, unless that is a folder, or the name of another format.

    >>> page_at("report.html").name
    'report.html'
    """
    path = PagePath(out)
    if path.suffix.lower() in _OTHER_FORMATS:
        raise ValueError(
            f"{path.name}: the page is HTML, and {path.suffix} is read as another format. Write it as "
            f"{path.with_suffix('.html').name!r}; a browser shows it, and prints it to a PDF."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name the page in it, as in {str(path / 'report.html')!r}.")
    return path


_OTHER_FORMATS = frozenset(
    {".pdf", ".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp", ".md", ".rst", ".tex", ".txt", ".docx", ".ipynb"}
    | {".json", ".csv", ".xml", ".zip", ".py", ".pt", ".pth", ".npy", ".npz", ".safetensors"}
)
