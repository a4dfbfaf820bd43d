"""`manyheads predict`: applies a checkpoint's task to one text, or to many, one per line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli import console, generation
from manyheads.cli.inputs import EncodingErrors, TextArgument, TextFile, Whole, open_texts, process_lines
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.generate.text import GeneratedText
    from manyheads.spec import Tree
    from manyheads.tasks.task import Pipeline


@console.app.command()
def predict(
    ctx: typer.Context,
    path: console.CheckpointPath,
    text: TextArgument = None,
    file: TextFile = None,
    whole: Whole = False,
    chat: Annotated[
        bool, console.flag("--chat", "Read each text as a message, with the chat template of the checkpoint.")
    ] = False,
    system: generation.System = None,
    max_new_tokens: generation.MaxNewTokens = None,
    num_beams: Annotated[int | None, console.integer_option("Beam width; 1 disables beam search [default: 1].")] = None,
    length_penalty: generation.LengthPenalty = None,
    temperature: generation.Temperature = None,
    top_k: generation.TopK = None,
    top_p: generation.TopP = None,
    repetition_penalty: generation.RepetitionPenalty = None,
    json_schema: Annotated[
        str | None,
        console.option("SCHEMA", "Generate JSON that matches this JSON Schema (a file or inline); {} allows any JSON."),
    ] = None,
    regex: Annotated[
        str | None, console.option("REGEX", "Generate a text that this regular expression matches.")
    ] = None,
    stop: generation.Stop = None,
    n: Annotated[int | None, console.integer_option("Sequences per text [default: 1].", "-n")] = None,
    logprobs: Annotated[
        int | None, console.integer_option("With --json, log p of each token and of the N most probable.")
    ] = None,
    other_settings: generation.OtherSettings = None,
    decoding: generation.Decoding = None,
    seed: generation.Seed = None,
    encoding_errors: EncodingErrors = "strict",
    stream: Annotated[
        bool | None,
        console.flag("--stream/--no-stream", "Print a generated text as it grows [default: in a terminal]."),
    ] = None,
    truncate: Annotated[
        bool, console.flag("--truncate", "Truncate a text that is too long instead of refusing it; a note reports it.")
    ] = False,
    loops: Annotated[
        bool, console.flag("--loops", "Report what a generated text repeats at its end: prefix, period and text.")
    ] = False,
    device: console.Device = "auto",
    weights: console.Weights = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
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
    settings = generation.settings_of(ctx.params)
    if system is not None and not chat:
        raise UsageError("--system is for a chat", hint="add --chat")
    if truncate and chat:
        raise UsageError("--truncate and --chat exclude each other: a truncated prompt is not a conversation")
    if stream and (loops or as_json):
        raise UsageError(f"--{'loops' if loops else 'json'} and --stream exclude each other")
    inputs = open_texts(text, file, whole=whole, encoding_errors=encoding_errors)

    def load() -> Pipeline:
        from manyheads.checkpoint.chat import chat_config
        from manyheads.generate.config import generation_config
        from manyheads.tasks.prediction import PredictOptions
        from manyheads.tasks.task import Pipeline

        checkpoint = console.load_checkpoint(path, device, weights)
        base = checkpoint.generation_settings
        config = chat_config(checkpoint, **settings) if chat else generation_config(base, **settings)
        options = PredictOptions(config, loops=loops, chat=chat, system=system)
        return Pipeline.from_checkpoint(checkpoint, options, truncate=truncate)

    if isinstance(inputs, str):
        is_plain = not (as_json or loops or "logprobs" in settings or settings.get("n", 1) != 1)
        may_stream = stream or (stream is None and is_plain and sys.stdout.isatty())
        predict_text(inputs, path, load, as_json=as_json, stream=stream if may_stream else False)
        return
    if stream:
        raise UsageError("--stream is for one text", hint="give a TEXT, or --whole")
    process_lines(inputs, path, load, as_json=as_json)


def predict_text(text: str, path: str, load: Callable[[], Pipeline], *, as_json: bool, stream: bool | None) -> None:
    """Prints the result for one text; with `stream` as it grows, with None if the task can do that."""
    with console.Progress(f"loading {path}") as progress:
        pipeline = load()
        can_stream = pipeline.task.generates_text and pipeline.checkpoint.tokenizer is not None
        if stream and not can_stream:
            raise UsageError("--stream is for generated texts, and this checkpoint generates none")
        progress.describe("predicting")
        if stream is not False and can_stream:
            ((ids, truncation),) = pipeline.task.encode_checked(pipeline.checkpoint, pipeline.options, [text])
            pieces = pipeline.checkpoint.text_generator.stream(ids, pipeline.options.generation)
            note = print_pieces(pieces, progress).note
            print_notes(truncation | ({} if note is None else {"note": note}))
            return
        ((_, result),) = pipeline.task.predict(pipeline.checkpoint, [text], pipeline.options)
    print_notes(result)
    if as_json:
        settings = {"settings": pipeline.options.generation.effective_settings()}
        console.print_json({"schema": 1} | result | (settings if pipeline.task.generates_text else {}))
    else:
        typer.echo("\n".join(pipeline.task.format_result(result)))


def print_pieces(pieces: Generator[str, None, GeneratedText], progress: console.Progress) -> GeneratedText:
    """Prints a text as it grows; returns the whole. The progress of reading the prompt ends with the first piece."""
    try:
        while True:
            piece = next(pieces)
            progress.stop()
            typer.echo(piece, nl=False)
    except StopIteration as end:
        return end.value
    finally:
        progress.stop()
        typer.echo()


def print_notes(result: Tree) -> None:
    """Prints the notes of a result on standard error."""
    if "truncated_to" in result:
        console.print_note(f"the text was truncated to {result['truncated_to']:,} tokens")
    if "note" in result:
        console.print_note(f"manyheads: {result['note']}")
