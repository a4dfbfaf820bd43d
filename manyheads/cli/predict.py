"""`manyheads predict`: applies a checkpoint's task to one text, or to many, one per line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli.console import AsJson, CheckpointPath, Device, Parts, Progress, app, integer, print_json, print_note
from manyheads.errors import EmptyDataError, InputError, RowError, UsageError

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.files.text import LineReader
    from manyheads.tasks.task import PredictOptions

CHUNK = 1024  # texts that are read together, so that those of similar length share a batch
MAX_CHUNK_LINES = 64 * CHUNK  # blank lines included
MAX_LINE_LENGTH = 1 << 24  # characters

LENGTH_PENALTY = typer.Option(metavar="ALPHA", help="α of beam search: log p / length^α. Higher gives longer texts.")


@app.command()
def predict(
    path: CheckpointPath,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT",
            help="The input; token ids if there is no tokenizer. Without it, or with -, standard input is read.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="One text per line; may be gzipped.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Maximum tokens to generate.")] = 64,
    num_beams: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Beam width; 1 disables beam search [default: 1].")
    ] = None,
    length_penalty: Annotated[float | None, LENGTH_PENALTY] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy [default: 0].")
    ] = None,
    decoding: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Decoding method, one of 'manyheads show decoding', or a table, {kind = ..., ...}.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="Random seed for sampling.")] = 0,
    encoding_errors: Annotated[
        str, typer.Option(metavar="strict|replace", help="What to do with a line that is not UTF-8.")
    ] = "strict",
    device: Device = "auto",
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Continue, fill in, classify, embed or answer texts.

    The checkpoint's task decides the output.

    Many texts, one per line, give one line each, in the same order. Line breaks in a result become spaces, and a blank
    line stays blank. With --json each line is one object, null for a blank line.

    Examples: manyheads predict ./gpt2 "The capital of France is" · manyheads predict ./bert "Paris is in [MASK]." ·
    manyheads predict runs/de-en --file german.txt --num-beams 4 > english.txt
    """
    from manyheads.generate.config import generation_config
    from manyheads.spec import override

    methods = {"num_beams": num_beams, "length_penalty": length_penalty, "temperature": temperature}
    settings: dict[str, Any] = {name: value for name, value in methods.items() if value is not None}
    settings |= {"max_new_tokens": max_new_tokens, "seed": seed} | override(
        {}, [f"decoding={decoding}"] if decoding else []
    )
    generation_config(**settings)  # raises for wrong settings before a model is loaded
    if encoding_errors not in ("strict", "replace"):
        raise UsageError(f"--encoding-errors is {encoding_errors!r}, expected strict or replace")
    if text is not None and file is not None:
        raise UsageError("TEXT and --file exclude each other")
    if text is None and file is None and sys.stdin.isatty():
        raise UsageError("there is no input", hint="give a TEXT, --file FILE, or one text per line on standard input")
    if text is None or text == "-":
        predict_lines(open_lines(file, encoding_errors), path, settings, device=device, as_json=as_json)
    else:
        predict_text(text, path, settings, device=device, as_json=as_json)


def load_for(path: str, settings: dict[str, Any], device: str) -> tuple[Checkpoint, PredictOptions]:
    """Loads the checkpoint; options of the command line override its settings of generation."""
    from manyheads.checkpoint.checkpoint import load
    from manyheads.generate.config import generation_config
    from manyheads.model.build import resolve_device
    from manyheads.tasks.task import PredictOptions

    checkpoint = load(path, device=resolve_device(device))
    checkpoint.check_reads_text()
    return checkpoint, PredictOptions(generation_config(checkpoint.generation_settings, **settings))


def predict_text(text: str, path: str, settings: dict[str, Any], *, device: str, as_json: bool) -> None:
    from manyheads.tasks.task import task_of

    with Progress(f"loading {path}"):
        checkpoint, options = load_for(path, settings, device)
        task = task_of(checkpoint)
        ((_, result),) = task.predict(checkpoint, [text], options)
    if "truncated" in result:
        print_note(f"the text was truncated to its first {result['truncated']:,} tokens, the maximum in training")
    if as_json:
        print_json({"schema": 1} | result)
    else:
        typer.echo("\n".join(task.format_result(result)))


def predict_lines(lines: LineReader, path: str, settings: dict[str, Any], *, device: str, as_json: bool) -> None:
    from manyheads.tasks.task import task_of

    chunks = read_chunks(lines)
    first = next(chunks)  # before the model is loaded, so that an unreadable file raises at once
    truncated = count = 0
    with Progress(f"loading {path}") as progress:
        checkpoint, options = load_for(path, settings, device)
        task, start = task_of(checkpoint), time.monotonic()
        for chunk in chain([first], chunks):
            results: list[Any] = [None] * len(chunk)
            numbers = [number for number, text in chunk if text.strip()]
            index = [i for i, (_, text) in enumerate(chunk) if text.strip()]
            try:
                for i, result in task.predict(checkpoint, [chunk[i][1] for i in index], options):
                    results[index[i]] = result
                    count += 1
                    rate = count / (time.monotonic() - start)
                    progress.update(f"{lines.path}: text", count, note=f"{rate:,.1f} per second")
            except InputError as error:
                raise RowError(f"{lines.path}, line {numbers[error.index]:,}: {error}") from None
            truncated += sum("truncated" in result for result in results if result)
            with progress.paused():
                for result in results:
                    if as_json:
                        print_json({"schema": 1} | result if result else None)
                    else:
                        typer.echo(task.format_line(result) if result else "")
    for warning, number in lines.warnings.items():
        print_note(f"{lines.path}: {number:,} lines {warning}")
    if truncated:
        print_note(f"{lines.path}: {truncated:,} texts were truncated to the maximum length in training")


def open_lines(file: Path | None, encoding_errors: str) -> LineReader:
    """Opens the lines of a file, or of standard input."""
    from manyheads.files.text import LineReader

    return LineReader(
        file or Path("standard input"),
        encoding_errors,
        MAX_LINE_LENGTH,
        file=None if file else sys.stdin.buffer,  # type: ignore[arg-type]
        length_hint="give one text per line",
        encoding_hint="save it as UTF-8, or use --encoding-errors replace",
    )


def read_chunks(lines: LineReader) -> Iterator[list[tuple[int, str]]]:
    """Yields groups of numbered lines, blank ones included, that are processed together; raises if all are blank."""
    chunk: list[tuple[int, str]] = []
    texts = count = 0
    for number, line in lines:
        chunk.append((number, line))
        texts, count = texts + bool(line.strip()), number
        if (line.strip() and texts % CHUNK == 0) or len(chunk) == MAX_CHUNK_LINES:
            yield chunk
            chunk = []
    if not texts:
        raise EmptyDataError(
            f"{lines.path} has no texts: {f'all {count:,} lines are blank' if count else 'it is empty'}"
        )
    if chunk:
        yield chunk
