"""`manyheads new`: writes a run file for a task and the user's data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from manyheads.cli import console


@console.app.command()
def new(
    task: Annotated[str, console.argument("TASK", "One of the kinds of 'manyheads show task'.")],
    file: Annotated[
        Path | None,
        console.argument("[FILE]", "Your data: .csv, .tsv, .jsonl, .parquet or .txt [default: built-in data]."),
    ] = None,
    output: Annotated[
        Path | None, console.output_option("RUN.toml", "File to write [default: standard output].")
    ] = None,
    architecture: Annotated[
        str | None,
        console.option("ARCHITECTURE", "Architecture of the model, such as recurrent [default: by the task]."),
    ] = None,
    columns: Annotated[str | None, console.option("A,B", "Columns to read, by name or by number from 0.")] = None,
    overrides: Annotated[
        list[str] | None, console.option("PATH=VALUE", "A field of the data, such as data.header=false.", "--set", "-s")
    ] = None,
    minutes: Annotated[float, console.option("N", "Training time on this machine.")] = 30.0,
    init_from: Annotated[
        str | None, console.option("PATH", "Checkpoint to fine-tune: a run, a Hugging Face folder or a Hub name.")
    ] = None,
    force: Annotated[bool, console.flag("--force", "Overwrite an existing file.")] = False,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Write a run file for a task and your data.

    Architecture, size, tokenizer, batch size and steps are chosen for the data and this machine, each with its reason.

    Examples: manyheads new translate pairs.tsv --output run.toml · manyheads new copy ·
    manyheads new classify reviews.jsonl --columns text,stars --init-from ./bert
    """
    from manyheads.files.write import check_new_file, write_text

    if output is not None:
        check_new_file(output, force=force, hint="--force overwrites it")
    console.check_exists(file)

    from manyheads.training.suggest import suggest_run

    action = f"reading {file or task} and timing this machine"
    with console.Progress(action, first_line=0) as progress:
        if not as_json:
            progress.describe(action)
        text, reasons = suggest_run(
            task,
            file,
            architecture=architecture,
            columns=columns,
            overrides=overrides or [],
            minutes=minutes,
            init_from=init_from,
        )
    if output is not None:
        write_text(output, text, overwrite=force)
    if as_json:
        console.print_json({"schema": 1, "path": output, "toml": text, "reasons": reasons})
        return
    for reason in reasons:
        console.print_note(reason)
    if output is None:
        typer.echo(text, nl=False)
        return
    command = shlex.join(("manyheads", "train", str(output), "--output", f"runs/{output.stem}"))
    console.print_note(f"wrote {output}; next: {command}")
