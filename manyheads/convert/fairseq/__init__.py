"""Reads fairseq checkpoints without executing code from them."""
