"""Loading, using and exporting checkpoints in any supported format."""
