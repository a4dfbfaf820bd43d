"""Bounded reading, atomic writing and hashing: the only package that touches untrusted or durable files."""
