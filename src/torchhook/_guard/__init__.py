"""The first NaN or Inf, and what made it: first_pass → repetition → watcher (thorough) → judge. Enter at ``api``."""
