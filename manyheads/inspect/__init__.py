"""Looking into a model."""
