"""The job that fills a feature store, every row exactly once. Enter at ``api``.

``api`` → ``job``: check, prepare, execute, finish. A shard is done by ``task``: ``sources`` (rows of the data) →
``forward`` (hooks, early stop) → ``fill`` and ``slabs`` (the one copy) → ``writer`` → the store in ``_features``.
``identity`` is what a store must be of to be gone on with. ``engines`` and ``ray`` say who does which. Who writes no
store, as ``stream`` and ``statistics``, goes over the data by ``passes``, which hands out tokens (``token_choice``).
"""
