"""The command line: one file per command, and what they share: the console for output and errors, and the input of texts."""

from manyheads.cli.console import main as main
