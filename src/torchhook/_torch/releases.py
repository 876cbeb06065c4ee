"""Which versions of torch: the oldest that will do, and the newest that the tests were run with.

``_torch`` asks when it is imported, before anything else of torch is looked for.
"""

from __future__ import annotations

import re

from torchhook.errors import TorchVersionError, TorchVersionWarning, warn

OLDEST = 2, 6
"""The first version of torch that has all that is needed."""
NEWEST_TESTED = 2, 15
"""The newest version of torch that the tests were run with; ``docs/compatibility.md`` names all."""


def check(found: str) -> None:
    """Refuse a torch that is too old; say of one that nobody has tried that nobody has."""
    parts = re.match(r"(\d+)\.(\d+)", found)
    release = (int(parts[1]), int(parts[2])) if parts else NEWEST_TESTED  # a build of one's own may be called anything
    if release < OLDEST:
        raise TorchVersionError(
            f"TorchHook needs torch {_dotted(OLDEST)} or newer, and this is torch {found}: pip install "
            f'"torch>={_dotted(OLDEST)}"'
        )
    if release > NEWEST_TESTED:
        warn(
            f"torch {found} is newer than any that this TorchHook was tested with (up to {_dotted(NEWEST_TESTED)}). "
            "Look for a newer TorchHook; if there is none, check values and gradients that matter against bare hooks.",
            TorchVersionWarning,
        )


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
