"""Numbers and names in words, as errors, tables and notes say them."""

from __future__ import annotations

from collections.abc import Sequence


def plural(number: int, one: str, many: str = "") -> str:
    """The word that goes with a number.

    >>> plural(1, "site"), plural(2, "site"), plural(0, "class", "classes")
    ('site', 'sites', 'classes')
    """
    return one if number == 1 else many or f"{one}s"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things in words.

    >>> counted(1, "site"), counted(1200, "site"), counted(0, "class", "classes")
    ('1 site', '1,200 sites', '0 classes')
    """
    return f"{number:,} {plural(number, one, many)}"


def times(number: int) -> str:
    """How often.

    >>> times(1), times(3)
    ('once', '3 times')
    """
    return "once" if number == 1 else f"{number} times"


def and_more(left: int) -> str:
    """What comes after the names that are said, if any are left.

    >>> and_more(2), and_more(0)
    (' and 2 more', '')
    """
    return f" and {left} more" if left > 0 else ""


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    return ", ".join(names[:most]) + and_more(len(names) - most)
