"""Decoding with quantized weights: blocks as GGUF files have them, and C kernels that are built on first use."""
