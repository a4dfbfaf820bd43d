"""Generating text with any model that decodes. Importing this package fills the slot of decoding methods."""

from manyheads.generate import methods

__all__ = ["methods"]
