"""Tokens while the model runs. Enter at ``api``: ``refill`` runs the model, ``staging`` takes its values in the hooks,
``pool`` is the buffer."""
