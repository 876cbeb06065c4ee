"""The store on disk: what was run (``manifest``), shards, where they lie (``storage``), reading. Runs no model.

Enter at ``api``: ``Features`` → ``columns`` → ``reading``; ``dataset``, ``statistics``, ``export`` and ``verify`` use
those.
"""
