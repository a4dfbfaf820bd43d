"""The command line in real processes, each forked from one that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import pty
import signal
import sys
import tempfile
import termios
from dataclasses import dataclass
from fcntl import ioctl
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from manyheads import cli

FORKS = multiprocessing.get_context("forkserver")
# imported in advance, because a child may not be allowed to read files (tests limit that)
LAZY_IMPORTS = [
    "sacrebleu",
    "matplotlib.pyplot",
    "pydantic.type_adapter",
    "rich.console",
    "rich.table",
    "typer._adapters",
    "typer._click.decorators",
]
SHARED = ("console", "generation", "inputs", "lab_report")  # by several commands
COMMAND_NAMES = [module.name for module in pkgutil.iter_modules(cli.__path__) if module.name not in SHARED]
LIBRARY = [  # but no command: a process imports its own, and reads the options of no other
    "cli.console",
    "inspect.describe",
    "inspect.drawing",
    "inspect.audit",
    "training.loop",
    "training.estimate",
    "training.evaluator",
    "checkpoint.exporter",
    "labs.processes",
    "labs.views.page_html",
]
PRELOADED = [  # a name that does not exist would be skipped without an error
    "torch",
    "torch._dynamo",
    *(f"manyheads.{module}" for module in LIBRARY),
    *LAZY_IMPORTS,
    "pytest",  # which a child imports with the test module of its `before`
    "command",
]
FORKS.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def default_signals():
    """In a process: the signals as a terminal starts it. `make test &` starts with SIGINT ignored, nohup with SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def child(arguments, stdin, stdout, stderr, cwd, env, before=None):
    default_signals()
    for stream, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(stream.fileno() if isinstance(stream, Connection) else os.open(stream, os.O_RDWR), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if name := env.get("TEST_CONTEXT"):  # for tests/mutants.py; the server of forks was started in another test
        import coverage

        coverage.Coverage.current().switch_context(name)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", encoding=encoding), open(2, "w", encoding=encoding)  # noqa: SIM115
    sys.argv = ["manyheads", *arguments]
    from manyheads.cli import console

    console.load_commands(arguments[0] if arguments else "")
    if before is not None:
        before()
    console.main()


def set_attribute(module, name, value):
    """As `before`: sets a constant of a module, without the imports of a test module."""
    setattr(import_module(module), name, value)


def started(*arguments, stdin=os.devnull, stdout=os.devnull, stderr=os.devnull, cwd=None, env=None, before=None):
    """The process of a command whose standard streams are files by their paths, or ends of pipes as Connection."""
    # readline, which pytest imports, puts COLUMNS into the environment of its workers
    env = env or {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams = (stdin, stdout, stderr)
    process = FORKS.Process(
        target=child, args=([*map(str, arguments)], *streams, cwd or os.getcwd(), dict(env), before)
    )
    process.start()
    for stream in {item for item in streams if isinstance(item, Connection)}:
        stream.close()
    return process


def at_terminal(*arguments, **env):
    """The process of a command at a new terminal, and the file descriptor of the other end of that terminal."""
    master, slave = pty.openpty()
    end = Connection(slave)
    return started(*arguments, stdin=end, stdout=end, stderr=end, env=os.environ | env, before=own_terminal), master


def own_terminal():
    os.setsid()
    ioctl(0, termios.TIOCSCTTY, 0)


def run(*arguments, check=0, cwd=None, env=None, timeout=120, stdin=b"", before=None):
    """What a command writes and its exit status; `before` is called first, in its process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("in", "out", "err")]
        for path in paths:
            path.write_bytes(stdin if path.name == "in" else b"")
        stdin, stdout, stderr = paths
        process = started(*arguments, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, before=before)
        process.join(timeout)
        if timed_out := process.exitcode is None:
            process.kill()
            process.join()
        done = Done(process.exitcode, *(path.read_text(encoding="utf-8", errors="replace") for path in paths[1:]))
    assert not timed_out, f"{' '.join(map(str, arguments))} did not end within {timeout} seconds"
    assert check is None or done.returncode == check, done.stderr
    return done


def run_json(*arguments, **options):
    """The JSON object that a command prints."""
    return json.loads(run(*arguments, "--json", **options).stdout)


def error_of(*arguments, check, **options):
    """The error of a command: one JSON object on standard error with --json, and nothing on standard output."""
    done = run(*arguments, "--json", check=check, **options)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    report = json.loads(done.stderr)
    assert report["schema"] == 1
    assert set(report["error"]) == {"code", "message", "hint"}
    return report["error"]
