"""What all commands share: options, standard output, progress on standard error, and errors.

Results go to standard output, everything else to standard error. torch is imported by the commands that need it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from manyheads.errors import (
    FileAccessError,
    InternalError,
    ManyheadsError,
    OutOfDiskError,
    PathNotFoundError,
    UsageError,
    one_line,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.table import Table

    from manyheads.checkpoint.checkpoint import Checkpoint

PROGRESS_SECONDS = 10.0  # between lines of progress if standard error is not a terminal
PIPED_WIDTH = 200  # columns of a table if standard output is not a terminal
EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130


class SortedGroup(typer.core.TyperGroup):
    """Lists the commands in alphabetical order, whichever file is imported first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))


app = typer.Typer(
    name="manyheads",
    cls=SortedGroup,
    help="One transformer, every part swappable, every claim testable.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# ------------------------------------------------------------------------------------------------------------- options


def integer(text: str | int) -> int:
    """Parses a number on the command line."""
    if not re.fullmatch("[+-]?[0-9]{1,30}", str(text)):
        raise typer.BadParameter(f"given {str(text)[:40]!r}, expected an integer")
    return int(text)


def output_path(text: str | Path) -> Path:
    """Parses the path of an output; an empty one, as from an unset variable of a shell, would be the current folder."""
    if not str(text):
        raise typer.BadParameter("given an empty path, expected the name of a file or a folder")
    return Path(text)


def option(metavar: str, help: str, *names: str, **settings: Any) -> Any:  # noqa: A002
    """Declares an option with a value. Without names, the parameter's is used: `max_rows` is --max-rows."""
    return typer.Option(*names, metavar=metavar, help=help, **settings)


def integer_option(help: str, *names: str, metavar: str = "N") -> Any:  # noqa: A002
    return option(metavar, help, *names, parser=integer)


def path_option(metavar: str, help: str, *names: str) -> Any:  # noqa: A002
    """Declares an option for the path of an output."""
    return option(metavar, help, *names, parser=output_path)


def output_option(metavar: str, help: str) -> Any:  # noqa: A002
    return path_option(metavar, help, "--output", "-o")


def flag(name: str, help: str) -> Any:  # noqa: A002
    """Declares an option without a value."""
    return typer.Option(name, help=help)


def argument(metavar: str, help: str, **settings: Any) -> Any:  # noqa: A002
    return typer.Argument(metavar=metavar, help=help, **settings)


def print_version(requested: bool) -> None:
    if requested:
        import torch

        from manyheads import __version__

        device = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"
        typer.echo(f"manyheads {__version__} · torch {torch.__version__} · {device}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show version, torch and device.")
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Declares the options before the command; `main` handles --debug, so that it may also follow the command."""


def check_exists(path: str | Path | None) -> None:
    """Raises if an argument names a path that does not exist."""
    if path is not None and not os.path.exists(path):
        raise PathNotFoundError(f"no file or folder {path}")


def check_checkpoint_path(text: str) -> str:
    """Raises at once, before torch is imported, if a path does not exist and is no OWNER/NAME either."""
    if text and (text.count("/") != 1 or os.path.isdir(text.partition("/")[0])):
        check_exists(text)
    return text


def load_checkpoint(path: str, device: str, weights: str | None = None) -> Checkpoint:
    """Loads the checkpoint of a command to the device, and with the weights, of its options."""
    from manyheads.checkpoint.loading import load
    from manyheads.model.builder import resolve_device

    return load(path, device=resolve_device(device), weights=weights)


def load_user_parts(context: typer.Context, paths: list[Path] | None) -> list[Path] | None:
    if paths and not context.resilient_parsing:
        from manyheads import spec

        for path in paths:
            spec.load_parts(path)
    return paths


def overrides_option(example: str) -> Any:
    help = f"Override one field; may be repeated. Example: -s {example}"  # noqa: A001
    return option("PATH=VALUE", help, "--set", "-s")


ModelOverrides = Annotated[list[str] | None, overrides_option("decoder.position=rope")]
RunOverrides = Annotated[list[str] | None, overrides_option("model.decoder.position=rope")]
Parts = Annotated[
    list[Path] | None,
    option(
        "FILE.py",
        "A Python file with your own parts; may be repeated. This file is executed; no other file is.",
        "--parts",
        callback=load_user_parts,
    ),
]
Device = Annotated[str, option("DEVICE", "auto, cpu, cuda, cuda:1 or mps; auto uses a GPU if there is one.")]
Weights = Annotated[
    str | None,
    option(
        "FORMAT",
        "Quantize matrices to int8 or int4, or use those of a GGUF file as stored; decodes faster on a CPU.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only warnings and errors.")]
AsJson = Annotated[bool, flag("--json", "Print one JSON object; errors too, on standard error.")]
RunFile = Annotated[Path, argument("RUN.toml", "A run file: model, data, tokenizer, task, training.")]
CheckpointPath = Annotated[
    str,
    argument(
        "PATH",
        "A run folder, a Hugging Face folder, OWNER/NAME on the Hub, a .gguf file, or a fairseq folder.",
        callback=check_checkpoint_path,
    ),
]

# -------------------------------------------------------------------------------------------------------------- output


def stdout() -> Console:
    """Returns a console for tables and text, of fixed width if the output is piped."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if re.fullmatch("[1-9][0-9]{1,3}", columns) else PIPED_WIDTH
    return Console(width=None if sys.stdout.isatty() else piped, markup=False, highlight=False, emoji=False)


def new_table(left: Iterable[str], right: Iterable[str] = (), *, title: str | None = None) -> Table:
    """Makes a table with left-aligned and then right-aligned columns; long cells are folded, never truncated."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def print_json(data: Any) -> None:
    """Prints one line of JSON, in which null stands for an infinite number; NaN raises."""
    infinite = {"Infinity": None, "-Infinity": None}
    tree = json.loads(json.dumps(data, default=str), parse_constant=infinite.__getitem__)
    typer.echo(json.dumps(tree, ensure_ascii=False))


def print_note(text: str) -> None:
    """Prints one line on standard error."""
    print(one_line(text), file=sys.stderr, flush=True)


def shade(value: float) -> str:
    """Returns a character for a value from 0 to 1, darker for higher values."""
    return " ░▒▓█"[min(4, max(0, int(5 * value)))]


class Progress:
    """Progress on standard error: a bar in a terminal, otherwise one line every ten seconds; hidden if quiet.

    `with Progress("loading") as progress: progress.update("row", 3, 100, "loss 0.5")`
    """

    def __init__(self, text: str, *, quiet: bool = False, first_line: float = PROGRESS_SECONDS) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self.quiet, self.next_line, self.name = quiet, time.monotonic() + first_line, ""
        is_live = sys.stderr.isatty() and not self.console.is_dumb_terminal and not quiet
        self.bars = new_bars(self.console, one_line(text)) if is_live else None

    def __enter__(self) -> Self:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the bar off the terminal."""
        if self.bars is not None:
            self.bars.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Takes the bar off the terminal while standard output is written."""
        self.stop()
        yield
        self.__enter__()

    def describe(self, text: str) -> None:
        """Shows what begins now, beside the bar or as a line."""
        if self.bars is not None:
            self.bars.update(self.bars.task_ids[0], description=one_line(text))
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + PROGRESS_SECONDS
            self.line(text)

    def update(self, name: str, done: int, total: int | None = None, note: str = "") -> None:
        """Shows that `done` of `total` items of this name are done, with a note such as the loss."""
        text = f"{name} {done:,}" + (f" of {total:,}" if total else "")
        if self.bars is not None:
            (bar,) = self.bars.task_ids
            if name != self.name:
                self.name = name
                self.bars.reset(bar)
            self.bars.update(bar, completed=done, total=total, note=one_line(note))
            self.describe(text)
        else:
            self.describe(f"{text} · {note}" if note else text)

    def line(self, text: str, *, warning: bool = False) -> None:
        """Prints a line above the bar; warnings are shown even if quiet."""
        if warning or not self.quiet:
            self.console.print(one_line(text), soft_wrap=True)


def new_bars(console: Console, text: str) -> Bars:
    """Makes a progress bar of rich with one task."""
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    description, note = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))

    class TimeLeft(TimeRemainingColumn):
        """The time that is left, if the total is known."""

        def render(self, task: Task) -> Text:
            return Text("") if task.total is None else super().render(task) + Text(" left")

    columns: tuple[ProgressColumn, ...] = (description, BarColumn(), note, TimeElapsedColumn(), TimeLeft())
    bars = Bars(*columns, console=console, transient=True)
    bars.add_task(text, total=None, note="")
    return bars


# ------------------------------------------------------------------------------------------- standard streams, signals


class StderrFile(io.FileIO):
    """Standard error, which drops what cannot be written: its reader ended, its disk is full, its terminal is gone."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream = stream  # which would close the file if it were garbage-collected

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def open_streams() -> None:
    """Opens the null device for closed standard streams, so that no file gets their numbers, and reopens stderr."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the system gives the lowest free number, which is that of the closed stream
            null = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(null.fileno(), True)
            setattr(sys, name, null)
    # a character that the terminal cannot show becomes ?
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        buffer = io.BufferedWriter(StderrFile(sys.stderr))
        sys.stderr = io.TextIOWrapper(buffer, sys.stderr.encoding, "replace", line_buffering=True)


def exit_at_signals() -> None:
    """At SIGTERM and SIGHUP raises SystemExit, so that temporary files are removed; `train` saves a checkpoint first.

    A second SIGTERM ends it at once. A second SIGHUP does not, because a terminal and its shell both send one.
    """

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, stop)


# -------------------------------------------------------------------------------------------------------------- errors


def load_commands(name: str = "") -> None:
    """Imports the file of one command, or of every command if there is none of this name."""
    files = [module.name for module in iter_modules([str(Path(__file__).parent)])]
    for file in [name] if name in files else files:  # declaring all options of all commands takes a tenth of a second
        import_module(f"manyheads.cli.{file}")


def main() -> None:
    """Runs a command. Prints an error as one sentence, as a JSON object (--json) or with its traceback (--debug)."""
    open_streams()
    exit_at_signals()
    warnings.showwarning = lambda message, *_, **__: print_note(f"manyheads: {message}")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = sys.argv[1:end]
    arguments = [option for option in options if option != "--debug"] + sys.argv[end:] or ["--help"]
    load_commands(arguments[0])
    try:
        sys.exit(app(arguments, standalone_mode=False))
    except BrokenPipeError:  # the program that reads our output ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except Exception as exception:
        if "--debug" in options:
            raise
        error = as_error(exception)
        as_json = json.dumps(error_report(error), ensure_ascii=False)
        print(as_json if "--json" in options else f"manyheads: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def error_report(error: ManyheadsError) -> dict[str, Any]:
    """An error as plain data."""
    return {"schema": 1, "error": {"code": error.code, "message": error.message, "hint": error.hint}}


def as_error(exception: Exception) -> ManyheadsError:
    """Converts any exception to an error with a code and an exit status."""
    from manyheads.files.write import DISK_FULL

    if isinstance(exception, ManyheadsError):
        return exception
    if format_message := getattr(exception, "format_message", None):  # typer's errors about the command line
        context = getattr(exception, "ctx", None)
        command = context.command_path if context else "manyheads"
        return UsageError(format_message().rstrip("."), hint=f"see '{command} --help'")
    if isinstance(exception, OSError) and exception.errno in DISK_FULL:
        return OutOfDiskError(f"cannot write {exception.filename or 'the output'}: {exception.strerror}")
    if isinstance(exception, OSError) and exception.filename is not None:
        return FileAccessError(f"cannot read or write {exception.filename}: {exception.strerror}")
    return InternalError(f"{exception} ({type(exception).__name__})", hint="--debug shows the traceback")
