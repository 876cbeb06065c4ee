"""What a model is made of."""
