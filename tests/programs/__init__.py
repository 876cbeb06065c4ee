"""Random programs that try to break what is captured: drawn from a seed, judged by bare torch, shrunk if they do.

``draw`` writes the source of a small model, ``judge`` runs it bare and under sessions and says where they differ,
``shrink`` makes a program that shows such a difference as short as it can be. ``python -m tests.programs`` hunts.
"""
