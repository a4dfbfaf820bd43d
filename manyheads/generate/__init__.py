"""Writing with a model."""
