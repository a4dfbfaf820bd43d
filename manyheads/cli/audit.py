"""`manyheads audit`: checks a model against laws that every model must keep."""

from __future__ import annotations

from dataclasses import asdict

import typer

from manyheads.cli.console import (
    EXIT_FAILURE,
    AsJson,
    CheckpointPath,
    Parts,
    Progress,
    app,
    new_table,
    print_json,
    stdout,
)

STYLES = {"ok": "green", "fault": "bold red", "not checked": "dim"}


@app.command()
def audit(path: CheckpointPath, parts: Parts = None, as_json: AsJson = False) -> None:
    """Check that a model keeps the laws of its architecture.

    Attention rows sum to one, outputs do not depend on later tokens, padding, caching and batching change nothing, and
    transformers gives the same logits. Exit status 1 if a law is broken.

    Example: manyheads audit ./model
    """
    from rich.text import Text

    from manyheads.inspect.audit import audit as run

    with Progress(f"auditing {path}"):
        rows = run(path)
    if as_json:
        print_json({"schema": 1, "rows": [asdict(row) for row in rows]})
    else:
        table = new_table(["law", "verdict", "value", ""])
        for row in rows:
            value = "" if row.value is None else f"{row.value:.3g}"
            table.add_row(row.law, Text(row.verdict, STYLES[row.verdict]), value, row.message)
        stdout().print(table)
    if any(row.verdict == "fault" for row in rows):
        raise typer.Exit(EXIT_FAILURE)
