"""Data sources, tokenizers, and rows as token ids in a reproducible order; knows no model."""
