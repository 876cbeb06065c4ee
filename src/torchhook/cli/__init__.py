"""The command ``torchhook``."""

from torchhook.cli.app import app, main

__all__ = ["app", "main"]
