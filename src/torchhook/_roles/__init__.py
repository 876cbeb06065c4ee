"""Standard names for the places of a transformer. Enter at ``api``: ``trace`` says what flowed where, ``chain`` finds
the blocks, ``branches``, ``attention``, ``experts`` by ``weighing``, and ``ends`` what is in and around them. Each name
comes with ``claims`` of what must hold, and ``proof`` tries all of it. ``lens`` runs the ``tail`` of a model again.
"""
