"""The first NaN or Inf, and what made it. Enter at ``api``.

``first_pass`` asks little of each value; where one is bad, ``repetition`` runs the pass again under ``watcher`` and
``thorough``, and ``judge`` says which one it was. What came from other ranks, ``reduced`` tells.
"""
