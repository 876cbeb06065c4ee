"""``python -m torchhook`` and the command ``torchhook``."""

from __future__ import annotations

import sys

from torchhook.errors import MissingExtraError, require


def main() -> None:
    """Run the command line. The library itself needs neither typer nor rich."""
    try:
        for package in ("typer", "rich"):
            require(package, "cli")
    except MissingExtraError as error:
        print(f"torchhook: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Only here: without the two packages it cannot even be imported.
    from torchhook._cli.api import main as run

    run()


if __name__ == "__main__":
    main()
