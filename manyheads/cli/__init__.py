"""The command line: one file per command, and what they share: their console, and how they read texts."""

from manyheads.cli.console import main as main
