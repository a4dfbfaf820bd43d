"""`manyheads predict`: applies a checkpoint's task to one text, or to many, one per line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli.console import (
    AsJson,
    CheckpointPath,
    Device,
    Parts,
    Progress,
    app,
    check_exists,
    error_report,
    integer,
    print_json,
    print_note,
)
from manyheads.errors import (
    DataError,
    EmptyDataError,
    FileAccessError,
    GenerationConfigError,
    InputError,
    ManyheadsError,
    UsageError,
)

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.files.text import LineReader
    from manyheads.spec import Tree
    from manyheads.tasks.task import PredictOptions, TaskSpec

CHUNK = 1024  # texts that are read together, so that those of similar length share a batch
MAX_CHUNK_LINES = 64 * CHUNK  # blank lines included
MAX_LINE_LENGTH = 1 << 24  # characters

LENGTH_PENALTY = typer.Option(metavar="ALPHA", help="α of beam search: log p / length^α. Higher gives longer texts.")

DECODING = typer.Option(
    metavar="KIND", help="Decoding method, one of 'manyheads show decoding', or a table, {kind = ..., ...}."
)


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
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            parser=integer, metavar="N", help="Maximum tokens to generate [default: the checkpoint's, or 64]."
        ),
    ] = None,
    num_beams: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Beam width; 1 disables beam search [default: 1].")
    ] = None,
    length_penalty: Annotated[float | None, LENGTH_PENALTY] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy [default: the checkpoint's].")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(parser=integer, metavar="K", help="Sample from the K most probable tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from the most probable tokens that sum to P.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="THETA", help="Above 1, makes tokens of the text so far less probable.")
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="Generate JSON of this schema: a file, or a text; {} is any JSON."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Generate a text that this regular expression matches.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", parser=integer, metavar="N", help="Sequences per text.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(parser=integer, metavar="N", help="With --json, log p of each token and of the N most probable."),
    ] = None,
    other_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="NAME=VALUE",
            help="Any other setting of 'manyheads show decoding' and 'manyheads show filter', such as min_p=0.1.",
        ),
    ] = None,
    decoding: Annotated[str | None, DECODING] = None,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="Random seed for sampling.")] = 0,
    encoding_errors: Annotated[
        str, typer.Option(metavar="strict|replace", help="What to do with a line that is not UTF-8.")
    ] = "strict",
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print a generated text as it grows [default: in a terminal]."),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Truncate a text that is too long for the model, with a note, and read it."),
    ] = False,
    device: Device = "auto",
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Continue, fill in, classify, embed or answer texts.

    The checkpoint's task decides the output.

    Many texts, one per line, give one line each, in the same order. Line breaks in a result become spaces, and a blank
    line stays blank. With --json each line is one object, null for a blank line. A line that cannot be read gives an
    empty line and a message, or an object with its error; the other lines are read, and the exit status is 3.

    Examples: manyheads predict ./gpt2 "The capital of France is" · manyheads predict ./bert "Paris is in [MASK]." ·
    manyheads predict runs/de-en --file german.txt --num-beams 4 > english.txt
    """
    from manyheads.generate.config import generation_config
    from manyheads.spec import override

    settings = decoding_settings(
        decoding,
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        json_schema=None if json_schema is None else read_schema(json_schema),
        regex=regex,
        logprobs=logprobs,
        seed=seed,
        n=n,
        stop=tuple(stop) if stop else None,
    )
    settings |= override({}, other_settings or [])
    generation_config(**settings)  # raises for wrong settings before a model is loaded
    if encoding_errors not in ("strict", "replace"):
        raise UsageError(f"--encoding-errors is {encoding_errors!r}, expected strict or replace")
    if text is not None and file is not None:
        raise UsageError("TEXT and --file exclude each other")
    if text is None and file is None and sys.stdin.isatty():
        raise UsageError("there is no input", hint="give a TEXT, --file FILE, or one text per line on standard input")
    check_exists(file)
    predictor = partial(load_predictor, path, settings, truncate=truncate, device=device)
    if text is None or text == "-":
        predict_lines(open_lines(file, encoding_errors), path, predictor, as_json=as_json)
    else:
        streams = stream if stream is not None else sys.stdout.isatty() and not (as_json or n > 1)
        predict_text(text, path, predictor, as_json=as_json, stream=streams)


def read_schema(value: str) -> str:
    """The JSON text of --json-schema, or of the file that it names."""
    from manyheads.files.read import decode, read_bytes
    from manyheads.generate.grammar import MAX_BYTES

    if value.lstrip()[:1] in ("", "{", "[", '"') or value.strip() in ("true", "false"):
        return value
    path = Path(value)
    check_exists(path)
    try:
        return decode(read_bytes(path, MAX_BYTES, error=GenerationConfigError), path, error=GenerationConfigError)
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror or error}") from None


def decoding_settings(decoding: str | None, **given: Any) -> dict[str, Any]:
    """The settings of generation that were given on the command line."""
    from manyheads.spec import override

    if decoding is not None and not decoding.strip():
        raise UsageError("--decoding is empty", hint="name one of 'manyheads show decoding'")
    settings = {name: value for name, value in given.items() if value is not None}
    return settings | override({}, [] if decoding is None else [f"decoding={decoding}"])


@dataclass(frozen=True)
class Predictor:
    """A checkpoint with its task and the settings of the command line."""

    checkpoint: Checkpoint
    task: TaskSpec
    options: PredictOptions


def load_predictor(path: str, settings: dict[str, Any], *, truncate: bool, device: str) -> Predictor:
    """Loads the checkpoint; options of the command line override its settings of generation."""
    from manyheads.checkpoint.checkpoint import load
    from manyheads.generate.config import generation_config
    from manyheads.model.build import resolve_device
    from manyheads.tasks.task import PredictOptions, task_of

    checkpoint = load(path, device=resolve_device(device))
    checkpoint.check_reads_text()
    task, generation = task_of(checkpoint), generation_config(checkpoint.generation_settings, **settings)
    if truncate:
        checkpoint = task.truncating(checkpoint, generation)
    return Predictor(checkpoint, task, PredictOptions(generation))


def predict_text(text: str, path: str, load: Callable[[], Predictor], *, as_json: bool, stream: bool) -> None:
    with Progress(f"loading {path}") as progress:
        model = load()
        if stream and model.task.streams:
            with progress.paused():
                rows, truncated = model.task.encode(model.checkpoint, [text], model.options)
                for piece in model.checkpoint.generator.stream(rows[0], model.options.generation):
                    typer.echo(piece, nl=False)
                typer.echo()
                if truncated:
                    print_note(f"the text was truncated to {truncated[0]['truncated']:,} tokens")
            return
        ((_, result),) = model.task.predict(model.checkpoint, [text], model.options)
    if "truncated" in result:
        print_note(f"the text was truncated to {result['truncated']:,} tokens")
    if "note" in result:
        print_note(f"manyheads: {result['note']}")
    if as_json:
        settings = {"settings": model.options.generation.applied} if model.task.streams else {}
        print_json({"schema": 1} | result | settings)
    else:
        typer.echo("\n".join(model.task.format_result(result)))


def predict_lines(lines: LineReader, path: str, load: Callable[[], Predictor], *, as_json: bool) -> None:
    chunks = read_chunks(lines)
    first = next(chunks)  # before the model is loaded, so that an unreadable file raises at once
    truncated = count = failed = 0
    notes = Counter[str]()
    with Progress(f"loading {path}") as progress:
        model, start = load(), time.monotonic()
        for chunk in chain([first], chunks):
            results: list[Tree | ManyheadsError | None] = [lines_error(lines, number) for number, _ in chunk]
            index, errors = [i for i, (_, text) in enumerate(chunk) if text.strip()], dict[int, InputError]()
            texts = [chunk[i][1] for i in index]
            for i, result in model.task.predict(model.checkpoint, texts, model.options, errors):
                results[index[i]] = result
                notes.update([result["note"]] if "note" in result else [])
                count += 1
                rate = count / (time.monotonic() - start)
                progress.update(f"{lines.path}: text", count, note=f"{rate:,.1f} per second")
            for i, error in errors.items():
                message = f"{lines.path}, line {chunk[index[i]][0]:,}: {error.message}"
                results[index[i]] = type(error)(message, hint=error.hint)
            truncated += sum(isinstance(result, dict) and "truncated" in result for result in results)
            failed += sum(isinstance(result, ManyheadsError) for result in results)
            with progress.paused():
                for one in results:
                    print_result(one, model.task, as_json=as_json)
    for warning, number in lines.warnings.items():
        print_note(f"{lines.path}: {number:,} lines {warning}")
    if truncated:
        print_note(f"{lines.path}: {truncated:,} texts were truncated to what the model can read")
    for note, number in notes.items():
        print_note(f"{lines.path}: {number:,} texts: {note}")
    if failed:
        print_note(f"{lines.path}: {failed:,} lines could not be read")
        raise typer.Exit(DataError.exit_status)


def lines_error(lines: LineReader, number: int) -> ManyheadsError | None:
    """Returns, and forgets, the error of a line that is not text."""
    return lines.errors.pop(number, None) if lines.errors else None


def print_result(result: Tree | ManyheadsError | None, task: TaskSpec, *, as_json: bool) -> None:
    """Prints one line for a result, for an error, which is also printed on standard error, or for a blank line."""
    if isinstance(result, ManyheadsError):
        print_json(error_report(result)) if as_json else print_note(f"manyheads: {result}")
        line = ""
    else:
        line = task.format_line(result) if result and not as_json else ""
        if as_json:
            print_json({"schema": 1} | result if result else None)
    if not as_json:
        typer.echo(line)


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
        errors={},
    )


def read_chunks(lines: LineReader) -> Iterator[list[tuple[int, str]]]:
    """Yields groups of numbered lines, blank ones included, that are processed together; raises if all are blank."""
    chunk: list[tuple[int, str]] = []
    texts = count = 0
    for number, line in lines:
        chunk.append((number, line))
        is_text = bool(line.strip()) or number in (lines.errors or {})
        texts, count = texts + is_text, number
        if (is_text and texts % CHUNK == 0) or len(chunk) == MAX_CHUNK_LINES:
            yield chunk
            chunk = []
    if not texts:
        raise EmptyDataError(
            f"{lines.path} has no texts: {f'all {count:,} lines are blank' if count else 'it is empty'}"
        )
    if chunk:
        yield chunk
