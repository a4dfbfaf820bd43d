"""fairseq checkpoints: reading them without running their code."""
