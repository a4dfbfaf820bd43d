"""The command line: one file per command, and one console for their output, progress and errors."""

from manyheads.cli.console import main as main
