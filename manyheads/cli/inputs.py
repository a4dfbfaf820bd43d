"""The texts that `predict` and `score` read, one or many, and what they print for many: one line each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from manyheads.cli import console
from manyheads.errors import DataError, EmptyDataError, InputError, ManyheadsError, RowError, UsageError

if TYPE_CHECKING:
    from manyheads.files.text import LineReader
    from manyheads.spec import Tree

CHUNK = 1024  # texts that are read together, so that those of similar length share a batch
MAX_CHUNK_LINES = 64 * CHUNK  # blank lines included
MAX_LINE_LENGTH = 1 << 24  # characters of a line, or of a whole file that is one text
FIELDS = ("text", "prompt")  # of an object in a .jsonl, one of which is the text
NOTES = {"truncated_to": "were truncated to what the model can read", "loop": "end in a loop"}  # by the key of a result

TextArgument = Annotated[
    str | None,
    console.argument(
        "TEXT", "The input; token ids if there is no tokenizer. Without it, or with -, standard input is read."
    ),
]
TextFile = Annotated[
    Path | None,
    console.option(
        "FILE",
        "One text per line; in a .jsonl one JSON string, or object with text or prompt. May be gzipped.",
        "--file",
        "-f",
    ),
]
Whole = Annotated[
    bool, console.flag("--whole", "Read all of the file, or of standard input, as one text with line breaks.")
]
EncodingErrors = Annotated[str, console.option("strict|replace", "What to do with a line that is not UTF-8.")]


class TextProcessor(Protocol):
    """Gives a result for each of many texts, with a model."""

    def results(self, texts: Sequence[str], errors: dict[int, InputError]) -> Iterator[tuple[int, Tree]]:
        """Yields the index and the result for each text; one that cannot be read has its error in `errors`."""

    def format_line(self, result: Tree) -> str:
        """Formats a result as one line of text."""


def open_texts(text: str | None, file: Path | None, *, whole: bool, encoding_errors: str) -> str | LineReader:
    """The one text that was given, or the lines of a file or of standard input."""
    if encoding_errors not in ("strict", "replace"):
        raise UsageError(f"--encoding-errors is {encoding_errors!r}, expected strict or replace")
    if text is not None and file is not None:
        raise UsageError("TEXT and --file exclude each other")
    if text is not None and text != "-":
        if whole:
            raise UsageError("--whole is for --file and standard input; TEXT may have line breaks as it is")
        return text
    if text is None and file is None and sys.stdin.isatty():
        raise UsageError("there is no input", hint="give a TEXT, --file FILE, or one text per line on standard input")
    console.check_exists(file)
    check_no_table(file)
    lines = open_lines(file, encoding_errors)
    return read_whole(lines) if whole else lines


def open_lines(
    file: Path | None,
    encoding_errors: str,
    encoding_hint: str = "save it as UTF-8, or use --encoding-errors replace",
) -> LineReader:
    from manyheads.files.text import LineReader

    return LineReader(
        file or Path("standard input"),
        encoding_errors,
        MAX_LINE_LENGTH,
        file=None if file else sys.stdin.buffer,  # type: ignore[arg-type]
        length_hint="give one text per line",
        encoding_hint=encoding_hint,
        errors={},
    )


def check_no_table(file: Path | None) -> None:
    """Raises for a table, whose header and other columns would be read as texts."""
    from manyheads.data.records import JSONL, TABLES, has_suffix

    if file is not None and has_suffix(file, *TABLES) and not has_suffix(file, *JSONL):
        raise UsageError(
            f"{file} is a table", hint="give a .txt with one text per line, or a .jsonl with text or prompt"
        )


def read_whole(lines: LineReader) -> str:
    """All lines as one text. A line break at the end of the last line is not part of it."""
    lines = replace(lines, errors=None, length_hint="split it into several texts")
    parts, length = [], -1
    for _, line in lines:
        parts.append(line)
        length += len(line) + 1
        if length > lines.max_length:
            raise lines.too_long(str(lines.path))
    text = "\n".join(parts)
    if not text.strip():
        raise EmptyDataError(f"{lines.path} has no text: {'it is blank' if parts else 'it is empty'}")
    print_warnings(lines)
    return text


def process_lines(lines: LineReader, path: str, load: Callable[[], TextProcessor], *, as_json: bool) -> None:
    """Prints one line per line of input, in the same order: its result, nothing for a blank one, or its error."""
    chunks = read_chunks(lines)
    first = next(chunks)  # before the model is loaded, so that an unreadable file raises at once
    key_counts, note_counts, notes, count, num_failed = Counter[str](), Counter[str](), Counter[str](), 0, 0
    with console.Progress(f"loading {path}") as progress:
        processor, start = load(), time.monotonic()
        for chunk in chain([first], chunks):
            results: list[Tree | ManyheadsError | None] = [lines_error(lines, number) for number, _ in chunk]
            index, errors = [i for i, (_, text) in enumerate(chunk) if text.strip()], dict[int, InputError]()
            for i, result in processor.results([chunk[i][1] for i in index], errors):
                results[index[i]] = result
                count += 1
                key_counts.update(name for name in NOTES if name in result)
                note_counts.update(name for name in NOTES if result.get(name) is not None)
                notes.update([result["note"]] if "note" in result else [])
                rate = count / (time.monotonic() - start)
                progress.update(f"{lines.path}: text", count, note=f"{rate:,.1f} per second")
            for i, error in errors.items():
                message = f"{lines.path}, line {chunk[index[i]][0]:,}: {error.message}"
                results[index[i]] = type(error)(message, hint=error.hint)
            num_failed += sum(isinstance(result, ManyheadsError) for result in results)
            with progress.pause():
                for line_result in results:
                    print_result(line_result, processor, as_json=as_json)
    print_warnings(lines)
    for name in key_counts:
        console.print_note(f"{lines.path}: {note_counts[name]:,} of {count:,} texts {NOTES[name]}")
    for note, number in notes.items():
        console.print_note(f"{lines.path}: {number:,} texts: {note}")
    if num_failed:
        console.print_note(f"{lines.path}: {num_failed:,} lines could not be read")
        raise typer.Exit(DataError.exit_status)


def print_warnings(lines: LineReader) -> None:
    for warning, number in lines.warnings.items():
        console.print_note(f"{lines.path}: {number:,} lines {warning}")


def lines_error(lines: LineReader, number: int) -> ManyheadsError | None:
    """Returns, and forgets, the error of a line that is not text."""
    return lines.errors.pop(number, None) if lines.errors else None


def print_result(result: Tree | ManyheadsError | None, processor: TextProcessor, *, as_json: bool) -> None:
    """Prints one line for a result, for an error, whose message goes to standard error, or for a blank line."""
    if isinstance(result, ManyheadsError):
        console.print_json(console.error_report(result)) if as_json else console.print_note(f"manyheads: {result}")
    elif as_json:
        console.print_json({"schema": 1} | result if result else None)
    if not as_json:
        typer.echo(processor.format_line(result) if isinstance(result, dict) else "")


def read_chunks(lines: LineReader) -> Iterator[list[tuple[int, str]]]:
    """Yields groups of numbered texts, blank ones included, that are processed together; raises if all are blank."""
    chunk: list[tuple[int, str]] = []
    texts = count = 0
    for number, line in read_json_lines(lines) if is_jsonl(lines) else lines:
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


def is_jsonl(lines: LineReader) -> bool:
    from manyheads.data.records import JSONL, has_suffix

    return has_suffix(lines.path, *JSONL)


def read_json_lines(lines: LineReader) -> Iterator[tuple[int, str]]:
    """Yields the text of each line of JSON, "" for a blank line or one that has none, whose error is kept."""
    for number, line in lines:
        text = ""
        try:
            text = json_text(line, f"{lines.path}, line {number:,}") if line.strip() else ""
        except RowError as error:
            assert lines.errors is not None
            lines.errors[number] = error
        yield number, text


def json_text(line: str, location: str) -> str:
    """The text of a line of JSON: a string, or that of an object."""
    from manyheads.data.records import parse_json_line
    from manyheads.spec import quote

    value = parse_json_line(line, location)
    texts = [value[name] for name in FIELDS if name in value] if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        expected = f"expected a string, or an object with one of {' and '.join(FIELDS)}"
        raise RowError(f"{location} has {quote(value)}, {expected}")
    return texts[0]
