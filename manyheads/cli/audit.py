"""`manyheads audit`: checks that a model keeps the invariants of its architecture."""

from __future__ import annotations

from dataclasses import asdict

import typer

from manyheads.cli import console

STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}


@console.app.command()
def audit(path: console.CheckpointPath, parts: console.Parts = None, as_json: console.AsJson = False) -> None:
    """Check that a model keeps the invariants of its architecture.

    Attention rows sum to one, outputs do not depend on later tokens, padding, caching and batching do not change the
    outputs, and transformers gives the same logits. Exit status 1 if a check fails.

    Example: manyheads audit ./model
    """
    from rich.text import Text

    from manyheads.inspect.audit import audit as run

    with console.Progress(f"auditing {path}"):
        rows = run(path)
    if as_json:
        console.print_json({"schema": 1, "rows": [asdict(row) for row in rows]})
    else:
        table = console.new_table(["check", "status", "value", ""])
        for row in rows:
            value = "" if row.value is None else f"{row.value:.3g}"
            table.add_row(row.check, Text(row.status, STYLES[row.status]), value, row.message)
        console.stdout().print(table)
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(console.EXIT_FAILURE)
