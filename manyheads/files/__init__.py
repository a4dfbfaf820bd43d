"""Bounded reading, atomic writing and hashing: the one room that touches untrusted or durable files."""
