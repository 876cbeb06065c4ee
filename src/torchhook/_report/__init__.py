"""One run of a model as one self-contained HTML page. Enter at ``api``."""
