"""``python -m torchhook`` is the command ``torchhook``."""

from torchhook._cli.api import main

if __name__ == "__main__":
    main()
