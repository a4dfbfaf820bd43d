"""Data sources, tokenizers, and rows as token ids in a reproducible order. This package does not depend on models."""
