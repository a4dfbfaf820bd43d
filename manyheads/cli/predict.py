"""`manyheads predict`: applies a checkpoint's task to one text, or to many, one per line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    integer,
    print_json,
    print_note,
)
from manyheads.cli.inputs import EncodingErrors, TextArgument, TextFile, Whole, open_texts, process_lines
from manyheads.errors import FileAccessError, GenerationConfigError, InputError, UsageError

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.generate.text import GeneratedText
    from manyheads.spec import Tree
    from manyheads.tasks.prediction import PredictOptions
    from manyheads.tasks.task import TaskSpec

MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        parser=integer,
        metavar="N",
        help="Maximum tokens to generate [default: the checkpoint's, or 64; 512 in a chat].",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy [default: the checkpoint's].")
]
TopK = Annotated[int | None, typer.Option(parser=integer, metavar="K", help="Sample from the K most probable tokens.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample from the most probable tokens that sum to P.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="THETA", help="Above 1, makes tokens of the text so far less probable.")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be repeated.")]
OtherSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Any other setting of 'manyheads show decoding' and 'manyheads show filter', such as min_p=0.1.",
    ),
]
Seed = Annotated[int, typer.Option(parser=integer, metavar="N", help="Random seed for sampling.")]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="The system prompt, which says how to answer.")
]

LENGTH_PENALTY = typer.Option(metavar="ALPHA", help="α of beam search: log p / length^α. Higher gives longer texts.")

DECODING = typer.Option(
    metavar="KIND", help="Decoding method, one of 'manyheads show decoding', or a table, {kind = ..., ...}."
)


@app.command()
def predict(
    path: CheckpointPath,
    text: TextArgument = None,
    file: TextFile = None,
    whole: Whole = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer a text as a message, by the chat template of the checkpoint.")
    ] = False,
    system: System = None,
    max_new_tokens: MaxNewTokens = None,
    num_beams: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Beam width; 1 disables beam search [default: 1].")
    ] = None,
    length_penalty: Annotated[float | None, LENGTH_PENALTY] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="Generate JSON of this schema: a file, or a text; {} is any JSON."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Generate a text that this regular expression matches.")
    ] = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option("-n", parser=integer, metavar="N", help="Sequences per text.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(parser=integer, metavar="N", help="With --json, log p of each token and of the N most probable."),
    ] = None,
    other_settings: OtherSettings = None,
    decoding: Annotated[str | None, DECODING] = None,
    seed: Seed = 0,
    encoding_errors: EncodingErrors = "strict",
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print a generated text as it grows [default: in a terminal]."),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Truncate a text that is too long for the model, with a note, and read it."),
    ] = False,
    loops: Annotated[
        bool,
        typer.Option("--loops", help="Report what a generated text repeats at its end: prefix, period and text."),
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

    A text with line breaks is an argument, a line of a .jsonl file, or a whole file or standard input with --whole.

    Examples: manyheads predict ./gpt2 "The capital of France is" · manyheads predict ./bert "Paris is in [MASK]." ·
    manyheads predict runs/de-en --file german.txt --num-beams 4 > english.txt
    """
    settings = generation_settings(
        decoding,
        other_settings,
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
    if system is not None and not chat:
        raise UsageError("--system is for a chat", hint="add --chat")
    if truncate and chat:
        raise UsageError("--truncate and --chat exclude each other: a truncated prompt is not a conversation")
    if stream and (loops or as_json):
        raise UsageError(f"--{'loops' if loops else 'json'} and --stream exclude each other")
    inputs = open_texts(text, file, whole=whole, encoding_errors=encoding_errors)
    load = partial(
        load_predictor, path, settings, truncate=truncate, loops=loops, device=device, chat=chat, system=system
    )
    if isinstance(inputs, str):
        is_plain = not (as_json or loops or "logprobs" in settings or settings.get("n", 1) != 1)
        streams = stream if stream is not None else sys.stdout.isatty() and is_plain
        predict_text(inputs, path, load, as_json=as_json, stream=streams)
    else:
        process_lines(inputs, path, load, as_json=as_json)


def generation_settings(decoding: str | None, other: list[str] | None, **given: Any) -> dict[str, Any]:
    """All settings of generation on the command line; wrong ones raise, before a model is loaded."""
    from manyheads.generate.config import generation_config
    from manyheads.spec import override

    settings = decoding_settings(decoding, **given) | override({}, other or [])
    generation_config(**settings)
    return settings


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

    def results(self, texts: Sequence[str], errors: dict[int, InputError]) -> Iterator[tuple[int, Tree]]:
        return self.task.predict(self.checkpoint, texts, self.options, errors)

    def format_line(self, result: Tree) -> str:
        return self.task.format_line(result)


def load_predictor(
    path: str,
    settings: dict[str, Any],
    *,
    truncate: bool,
    loops: bool,
    device: str,
    chat: bool = False,
    system: str | None = None,
) -> Predictor:
    """Loads the checkpoint; options of the command line override its settings of generation."""
    from manyheads.checkpoint.chat import chat_config
    from manyheads.checkpoint.loading import load
    from manyheads.generate.config import generation_config
    from manyheads.model.build import resolve_device
    from manyheads.tasks.prediction import PredictOptions
    from manyheads.tasks.task import task_of

    checkpoint = load(path, device=resolve_device(device))
    checkpoint.check_reads_text()
    task = task_of(checkpoint)
    generation = (
        chat_config(checkpoint, **settings) if chat else generation_config(checkpoint.generation_settings, **settings)
    )
    options = PredictOptions(generation, loops=loops, chat=chat, system=system)
    task.check_options(options)
    if truncate:
        checkpoint = task.with_truncation(checkpoint, generation)
    return Predictor(checkpoint, task, options)


def predict_text(text: str, path: str, load: Callable[[], Predictor], *, as_json: bool, stream: bool) -> None:
    with Progress(f"loading {path}") as progress:
        predictor = load()
        if stream and predictor.task.streams and predictor.checkpoint.tokenizer is not None:
            with progress.paused():
                rows, truncation_by_row = predictor.task.encode_checked(predictor.checkpoint, [text], predictor.options)
                note = print_pieces(predictor.checkpoint.generator.stream(rows[0], predictor.options.generation)).note
                print_notes(truncation_by_row.get(0, {}) | ({} if note is None else {"note": note}))
            return
        ((_, result),) = predictor.task.predict(predictor.checkpoint, [text], predictor.options)
    print_notes(result)
    if as_json:
        settings = {"settings": predictor.options.generation.effective_settings} if predictor.task.streams else {}
        print_json({"schema": 1} | result | settings)
    else:
        typer.echo("\n".join(predictor.task.format_result(result)))


def print_pieces(pieces: Generator[str, None, GeneratedText]) -> GeneratedText:
    """Prints a text as it grows; returns the whole."""
    while True:
        try:
            typer.echo(next(pieces), nl=False)
        except StopIteration as end:
            typer.echo()
            return end.value


def print_notes(result: Tree) -> None:
    """Prints the notes of a result on standard error."""
    if "truncated" in result:
        print_note(f"the text was truncated to {result['truncated']:,} tokens")
    if "note" in result:
        print_note(f"manyheads: {result['note']}")
