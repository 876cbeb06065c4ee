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
}


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


def short(error: BaseException) -> str:
    """An error as one line.

    >>> short(ValueError("first\\nsecond"))
    'first second'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 600 else text[:597] + "..."
