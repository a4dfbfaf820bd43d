"""What a model is trained for: an objective makes a batch of some rows and scores what a model makes of it."""
