"""Texts, pairs, labels and pictures, and the order they come in; no model is known here."""
