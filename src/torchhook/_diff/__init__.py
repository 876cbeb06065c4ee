"""Two sides compared: models, programs, recordings, arrays; and where they first part. Enter at ``api``."""
