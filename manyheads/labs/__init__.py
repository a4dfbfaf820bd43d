"""Experiments that test claims, and plain implementations of published models that composed models must match."""
