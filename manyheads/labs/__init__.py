"""Experiments that test a claim, and plain models written from the formulas that composed models must match."""
