"""`manyheads ask`: answers a question from a model if it is confident, else from a database, and says from which."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli import console, generation
from manyheads.cli.inputs import EncodingErrors, TextArgument, TextFile, open_texts, process_lines
from manyheads.errors import UsageError, one_line

if TYPE_CHECKING:
    from manyheads.tasks.answering import Answer, Answerer


@console.app.command()
def ask(
    path: console.CheckpointPath,
    question: TextArgument = None,
    file: TextFile = None,
    threshold: Annotated[
        float, console.option("P", "The model answers if its answer has at least this probability.")
    ] = 0.5,
    database: Annotated[
        Path | None, console.option("FILE.db", "A SQLite file with a table answers(question, answer).")
    ] = None,
    queue: Annotated[
        Path | None,
        console.path_option(
            "FILE.tsv", "Append the question and your answer here if both do not know it, for training."
        ),
    ] = None,
    new_answer: Annotated[
        str | None, console.option("TEXT", "Your answer for the queue; asked for in a terminal.", "--answer")
    ] = None,
    max_new_tokens: generation.MaxNewTokens = None,
    encoding_errors: EncodingErrors = "strict",
    device: console.Device = "auto",
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Answer a question, and say where the answer comes from.

    The source is `model` if the probability of the generated answer, Π p(token), is at least the threshold, else
    `database` if that has the question as it is written, else `none`. A model answers questions about things that it
    never read, too, and the answer looks like any other: the threshold and the source are there for that.

    Many questions, one per line, give one line each: answer, source and probability, separated by tabs.

    Examples: manyheads ask runs/people "Where was Ada Lovelace born?" --database facts.db · manyheads ask runs/people
    "Where was Bo Ek born?" --threshold 0.9 --queue queue.tsv --answer Lund
    """
    from manyheads.files.write import check_new_file
    from manyheads.tasks.answering import Answerer, check_threshold

    check_threshold(threshold)
    console.check_exists(database)
    if queue is not None:
        check_new_file(queue, force=True)
    if new_answer is not None and queue is None:
        raise UsageError("--answer is for the queue", hint="add --queue FILE.tsv")
    inputs = open_texts(question, file, whole=False, encoding_errors=encoding_errors)

    def load() -> Answerer:
        checkpoint = console.load_checkpoint(path, device)
        return Answerer.from_checkpoint(
            checkpoint, threshold=threshold, database=database, max_new_tokens=max_new_tokens
        )

    if isinstance(inputs, str) and not inputs.strip():
        raise UsageError("the question is empty")
    if not isinstance(inputs, str):
        if queue is not None:
            raise UsageError("--queue is for one question", hint="give a TEXT")
        process_lines(inputs, path, load, as_json=as_json)
        return
    with console.Progress(f"loading {path}"):
        ((_, result),) = load().answers([inputs])
    console.print_json({"schema": 1} | result.to_tree()) if as_json else print_answer(result)
    if result.source == "none" and queue is not None:
        add_to_queue(queue, result, new_answer)


def print_answer(result: Answer) -> None:
    """Prints the answer, or that there is none, with its source."""
    if result.text is None:
        typer.echo("unknown")
    else:
        typer.echo(one_line(result.text))
    typer.echo(f"source: {result.source}")
    console.print_note(f"the model: {result.guess}, probability {result.probability:.4f}")


def add_to_queue(path: Path, result: Answer, text: str | None) -> None:
    """Appends the question with the user's answer; without one, asks for it in a terminal."""
    from manyheads.tasks.answering import queue_pair

    if text is None and sys.stdin.isatty():
        text = typer.prompt("your answer (empty: none)", default="", show_default=False, err=True)
    if not text:
        console.print_note(f"{path}: nothing is queued, because there is no answer")
        return
    queue_pair(path, result.question, text)
    console.print_note(f"{path}: added the question and your answer")
