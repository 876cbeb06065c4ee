"""The store on disk. Runs no model.

Enter at ``api``. Writing: ``store`` → ``manifest``, ``shards``, ``index`` → ``storage`` (a folder or a bucket) →
``direct_io``. Reading: ``features`` → ``columns`` → ``reading``; ``dataset``, ``tokens``, ``statistics`` and ``export``
use those. ``verify`` reads every byte.
"""
