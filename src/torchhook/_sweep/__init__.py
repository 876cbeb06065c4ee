"""Activation patching. Enter at ``api``; what is patched, how patches are run, and how they are estimated."""
