"""`manyheads look`: opens the page on a checkpoint, writes it as one file, or prints a head in the terminal."""

from __future__ import annotations

import time
import webbrowser
from typing import Annotated

import typer

from manyheads.cli.console import CheckpointPath, Device, Parts, Progress, app, integer, load_checkpoint, print_note
from manyheads.errors import MissingExtraError


@app.command()
def look(
    path: CheckpointPath,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text to show first.")] = None,
    port: Annotated[int, typer.Option(parser=integer, metavar="N", help="Port on loopback [default: a free one].")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False,
    device: Device = "auto",
    parts: Parts = None,
) -> None:
    """See the attention of a checkpoint in a page on this machine: every head, exactly.

    Examples: manyheads look runs/first "April 5, 1985" · manyheads look ./gpt2 "The cat sat on the mat"
    """
    try:
        from manyheads.studio.app import serve
    except ImportError:
        raise MissingExtraError("the page needs FastAPI and uvicorn", hint="pip install 'manyheads[studio]'") from None
    from manyheads.studio.session import Sessions

    with Progress(f"loading {path}"):
        checkpoint = load_checkpoint(path, device)
    with serve(Sessions([checkpoint], [path], text or ""), port) as address:
        typer.echo(address)
        print_note("Ctrl-C ends it")
        if not no_browser:
            webbrowser.open(address)
        while True:
            time.sleep(3600)
