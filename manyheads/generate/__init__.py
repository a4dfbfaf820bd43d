"""Text generation. Importing this package registers every decoding method."""

from manyheads.generate import methods

__all__ = ["methods"]
