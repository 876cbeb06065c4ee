"""The command ``torchhook``. Enter at ``api``."""
