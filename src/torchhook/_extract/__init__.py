"""The job that fills a feature store, every row exactly once. Enter at ``api``.

``sources`` (rows of the data) → ``forward`` (hooks, early stop) → ``fill`` and ``slabs`` (the one copy) → ``writer`` →
the store in ``_features``. ``task`` does that for one shard; ``engines`` and ``ray`` say who does which.
"""
