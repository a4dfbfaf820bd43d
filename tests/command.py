"""The command line in real processes, each forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
LATE = ["pydantic.type_adapter", "typer._adapters", "typer._click.decorators"]  # else read by a child that may no longer read them
FORKS.set_forkserver_preload(
    ["torch", "torch._dynamo", "manyheads.cli", "manyheads.show", "manyheads.auditing", "manyheads.training", *LATE, "command"]
)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def child(arguments, given, out, err, cwd, env, before=None):
    for path, place in ((given, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR), place)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", encoding=encoding), open(2, "w", encoding=encoding)  # noqa: SIM115
    sys.argv = ["manyheads", *arguments]
    if before is not None:
        before()
    from manyheads.cli import main

    main()


def run(*arguments, check=0, cwd=None, env=None, seconds=120, given=b"", before=None):
    """What a command writes and how it ends, given some bytes on its standard input; `before` is called first, in its process."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        (Path(folder) / "in").write_bytes(given)
        out.touch()
        err.touch()
        place = cwd or os.getcwd()
        process = FORKS.Process(
            target=child, args=([*map(str, arguments)], Path(folder) / "in", out, err, place, dict(env or os.environ), before)
        )
        process.start()
        process.join(seconds)
        if late := process.exitcode is None:
            process.kill()
            process.join()
        done = Done(process.exitcode, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, err)))
    assert not late, f"{' '.join(map(str, arguments))} did not end within {seconds} seconds"
    assert check is None or done.returncode == check, done.stderr
    return done
