"""Describes, audits and draws models."""
