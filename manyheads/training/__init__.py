"""From a run file to a trained model: the loop, what it keeps, and how it goes on where it stopped."""
