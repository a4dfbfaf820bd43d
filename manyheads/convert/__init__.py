"""Other people's checkpoints: a family is one two-way table of weights and a reading of its config."""
