"""GGUF files: reading and writing models, weights and vocabularies."""
