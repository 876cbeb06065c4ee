"""What goes wrong on a command line, in one line and with an exit code."""

from __future__ import annotations


class Trouble(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


def short(error: BaseException) -> str:
    """An error as one line.

    >>> short(ValueError("first\\nsecond"))
    'first second'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 600 else text[:597] + "..."
