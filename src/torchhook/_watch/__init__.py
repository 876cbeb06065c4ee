"""Statistics while training. Enter at ``api``.

``engine`` opens a session for each measured step of what ``watched`` has chosen. Its hooks call ``looks``, which notes
values in a ``step``; their numbers wait on the device in a ``ledger``, and end in a ``snapshot``, from which ``alarms``
and ``sinks`` are told.
"""
