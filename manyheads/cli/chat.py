"""`manyheads chat`: a conversation with a checkpoint, in a terminal or with one message per line of standard input."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from manyheads.cli import console, generation
from manyheads.cli.inputs import MAX_LINE_LENGTH, lines_error, open_lines
from manyheads.errors import DataError, DataSizeError, EncodingError, InputError, ManyheadsError, UsageError

if TYPE_CHECKING:
    from manyheads.checkpoint.chat import Conversation

PROMPT, CONTINUED = "> ", "… "
QUOTES = '"""'
HELP = f"""\
/system TEXT  set the system prompt; without TEXT, remove it
/undo         remove the last message and its answer
/reset        remove all messages; the system prompt stays
/save FILE    write the conversation as JSON to a new file
/exit         leave, as Ctrl-D does
A line that ends in \\ continues on the next one; {QUOTES} begins and ends a message of several lines. A space before /
makes it a message. Ctrl-C stops an answer, and what there is of it stays in the conversation."""


@console.app.command()
def chat(
    ctx: typer.Context,
    path: console.CheckpointPath,
    system: generation.System = None,
    max_new_tokens: generation.MaxNewTokens = None,
    temperature: generation.Temperature = None,
    top_k: generation.TopK = None,
    top_p: generation.TopP = None,
    repetition_penalty: generation.RepetitionPenalty = None,
    stop: generation.Stop = None,
    other_settings: generation.OtherSettings = None,
    decoding: generation.Decoding = None,
    seed: generation.Seed = None,
    device: console.Device = "auto",
    weights: console.Weights = None,
    parts: console.Parts = None,
) -> None:
    """Talk to a checkpoint that has a chat template.

    Each turn reads the conversation so far; if it fills the context, the oldest turns are dropped, with a note.

    Answers go to standard output, everything else to standard error. Piped standard input has one message, or one
    command such as /reset, per line. A line that cannot be answered gives a message on standard error; the others are
    answered, and the exit status is 3.

    Examples: manyheads chat SmolLM2-135M-Instruct.Q4_1.gguf · manyheads chat ./model --system "Answer in one word." ·
    printf 'Hello\\nWhat did I say?\\n' | manyheads chat ./model
    """
    settings = generation.settings_of(ctx.params)
    from manyheads.checkpoint.chat import Conversation

    with console.Progress(f"loading {path}"):
        checkpoint = console.load_checkpoint(path, device, weights)
        checkpoint.check_reads_text()
        conversation = Conversation(checkpoint, system=system, **settings)
    context = checkpoint.context_length
    length = "" if context is None else f" · {context:,} tokens of context"
    console.print_note(f"{path}{length} · /help lists the commands, Ctrl-D leaves")
    warnings.simplefilter("always", UserWarning)  # the same turns may be dropped again after /reset
    (chat_in_terminal if sys.stdin.isatty() else answer_lines)(conversation)


# ------------------------------------------------------------------------------------------------------------ messages


def chat_in_terminal(conversation: Conversation) -> None:
    """Reads messages from a terminal. Ctrl-C stops an answer, or clears the line; the second time, it leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for `input`
    interrupted = False
    while True:
        try:
            respond(conversation, *read_message(input_line))
            interrupted = False
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if interrupted:
                raise
            interrupted = True
            console.print_note("Ctrl-C again or Ctrl-D leaves")
        except ManyheadsError as error:
            console.print_note(f"manyheads: {error}")


def answer_lines(conversation: Conversation) -> None:
    """Reads messages from piped standard input."""
    lines, num_failed = open_lines(None, "strict", encoding_hint="send it as UTF-8"), 0
    numbered_lines = iter(lines)

    def next_line(prompt: str) -> str:
        number, line = next(numbered_lines, (0, ""))
        if not number:
            raise EOFError
        if error := lines_error(lines, number):
            raise error
        return line

    while True:
        try:
            respond(conversation, *read_message(next_line))
        except EOFError:
            break
        except (InputError, DataError, UsageError) as error:
            num_failed += 1
            console.print_note(f"manyheads: {error}")
    if num_failed:
        console.print_note(f"{lines.path}: {num_failed:,} lines were not answered")
        raise typer.Exit(DataError.exit_status)


def input_line(prompt: str) -> str:
    """Reads a line from a terminal; the prompt is not part of the output."""
    try:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.removesuffix("\n")
    except UnicodeDecodeError:
        raise EncodingError(f"the line is not text in {sys.stdin.encoding}") from None


def read_message(read_line: Callable[[str], str]) -> tuple[str, bool]:
    """A message of one line, or of several, and whether it is a command."""
    text, encoding_error = read_line(PROMPT), None
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            try:
                text = append_line(text, read_line)
            except EncodingError as error:  # the rest of the message is read, so that it is not taken for others
                encoding_error = error
        if encoding_error is not None:
            raise encoding_error
        return text.rstrip().removesuffix(QUOTES).strip("\n"), False
    is_command = text.startswith("/")
    while text.endswith("\\"):
        text = append_line(text[:-1], read_line)
    return text, is_command


def append_line(text: str, read_line: Callable[[str], str]) -> str:
    if len(text) > MAX_LINE_LENGTH:
        raise DataSizeError(f"the message is longer than {MAX_LINE_LENGTH:,} characters")
    try:
        return f"{text}\n{read_line(CONTINUED)}"
    except EOFError:
        raise DataError("the input ends in the middle of a message of several lines") from None


def respond(conversation: Conversation, text: str, is_command: bool) -> None:
    """Runs a command, or prints the answer to a message as it grows; raises EOFError to leave."""
    if not text.strip():
        return
    if is_command:
        name, argument = (*text.split(maxsplit=1), "")[:2]
        run_command(conversation, name, argument.strip())
        return
    before = len(conversation.messages)
    try:
        with closing(conversation.stream(text)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        typer.echo()
        is_answered = len(conversation.messages) > before
        console.print_note("stopped" if is_answered else "stopped before there was an answer; the message was removed")
        return
    typer.echo()
    answer = conversation.answer
    if answer is not None and answer.finish_reason == "length":
        console.print_note(answer.note or f"the answer ends here because it has {len(answer.token_ids):,} tokens")


# ------------------------------------------------------------------------------------------------------------ commands


def run_command(conversation: Conversation, name: str, argument: str) -> None:
    """Runs a command; /exit raises EOFError."""
    if argument and name in ("/undo", "/reset", "/help", "/exit"):
        raise UsageError(f"{name} takes no argument; nothing was sent")
    match name:
        case "/system":
            conversation.system = argument or None
            console.print_note("the system prompt is set" if argument else "the system prompt is removed")
        case "/undo":
            if not conversation.undo():
                raise UsageError("there is no message to remove")
            console.print_note("the last message and its answer are removed")
        case "/reset":
            conversation.reset()
            console.print_note("all messages are removed")
        case "/save":
            save(conversation, argument)
        case "/help":
            print(HELP, file=sys.stderr)
        case "/exit":
            raise EOFError
        case _:
            raise UsageError(f"no command {name}; nothing was sent", hint="/help lists the commands")


def save(conversation: Conversation, name: str) -> None:
    """Writes the messages as JSON, which `Checkpoint.chat` reads; raises if the file exists."""
    from manyheads.files.write import write_text

    if not name:
        raise UsageError("/save needs the name of a file")
    path = Path(name).expanduser()
    write_text(path, json.dumps(conversation.messages_from(), ensure_ascii=False, indent=2) + "\n")
    console.print_note(f"the conversation is in {path}")
