"""Statistics while training. Enter at ``api``."""
