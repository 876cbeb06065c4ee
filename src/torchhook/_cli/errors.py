"""What goes wrong on a command line, in one line and with an exit code."""

from __future__ import annotations

# What other modules advise in Python, as it is said on a command line.
_SPOKEN = {
    "open_features(path, incomplete=True).verify().discard(), then the same extract call again": (
        "torchhook features verify PATH --discard, then the same extract command again"
    ),
    "pass resume=False": "add --no-resume",
    "resume=False": "--no-resume",
    "with names=": "with --name A=B",
    "report.discard() does": "--discard does",
    "on_error='skip'": "--skip-errors",
    "retry_skipped=True": "--retry-skipped",
    "max_skipped=": "--max-skipped ",
    'on_error="skip"': "--skip-errors",
    "pass --skip-errors": "add --skip-errors",
    "Run the same extract call again: it does only those. incomplete=True opens what is there.": (
        "The same extract command again does only those; torchhook features info PATH tells what is there."
    ),
    "Run the same extract call again, or open what is there with incomplete=True.": (
        "The same extract command goes on with it; torchhook features info PATH tells what is there."
    ),
    "extract(..., --retry-skipped) tries again": "extract --retry-skipped tries again",
    "rows_per_shard=": "--rows-per-shard ",
    "batch_size=": "--batch-size ",
    "see rec.missing": "see --json",
    "give inputs=, what the model is called with": "add --input, --text, --tokens or --shape",
    "columns: '": "--columns: '",  # of layers; a store has columns too, and no option for them
}
_LINES = 40
"""So many lines of an error are shown: torch lists every signature of a function, and every weight of a model."""


class Trouble(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


def spoken(text: str) -> str:
    """Advice with the options of the command line in place of Python's arguments.

    >>> spoken("Begin again with resume=False.")
    'Begin again with --no-resume.'
    """
    for python, option in _SPOKEN.items():
        text = text.replace(python, option)
    return text


def told(error: BaseException) -> str:
    """An error as it was written, line by line, and what was noted with it.

    >>> print(told(ValueError("of another run:\\n  model: other numbers\\n\\n")))
    of another run:
      model: other numbers
    """
    notes = [str(note).removeprefix("torchhook: ") for note in getattr(error, "__notes__", ())]
    lines = "\n".join([str(error).strip() or type(error).__name__, *notes]).splitlines()
    shown = [line if len(line) <= 600 else line[:597] + "..." for line in lines[:_LINES]]
    return "\n".join(shown + ["..."] * (len(lines) > _LINES))


def short(error: BaseException) -> str:
    """An error as one line.

    >>> short(ValueError("first\\nsecond"))
    'first second'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 600 else text[:597] + "..."
