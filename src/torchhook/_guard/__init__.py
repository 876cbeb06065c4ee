"""The first NaN or Inf, and the place that made it. Enter at ``api``; read ``watcher`` next, then ``judge``."""
