"""`python -m manyheads` is `manyheads`."""

from manyheads.cli.console import main

main()
