"""Experiments with a verdict, and the plain models they are checked against."""
