"""Activation patching. Enter at ``api``: ``places`` says what is patched, ``running`` runs the patches, ``estimate``
tells what they would do by gradients."""
