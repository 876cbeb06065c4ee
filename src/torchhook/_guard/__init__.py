"""The first NaN or Inf, and what made it. Enter at ``api``; read ``watcher`` next, then ``judge``."""
