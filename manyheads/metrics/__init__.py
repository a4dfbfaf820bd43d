"""What a model's answers are worth: the metrics people cite, and the baselines that make a number mean something. Knows no model."""
