"""From a run file to a trained model: the loop, its checkpoints, resuming, evaluating and comparing runs."""
