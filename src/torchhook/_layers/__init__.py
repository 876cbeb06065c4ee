"""What a model is made of: its modules, its operations, what they cost. Enter at ``api``."""
