"""The log of a run: metrics.jsonl, one line per event, and TensorBoard event files next to it."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from manyheads.errors import needs_extra
from manyheads.files.read import open_regular
from manyheads.files.write import append_atomic, explain_write_errors, write_atomic
from manyheads.spec import Tree
from manyheads.training.events import Event

MAX_EVENT_BYTES = 1 << 24  # of a line of metrics.jsonl; a longer one is an error


@contextmanager
def open_log(folder: Path, *, tensorboard: bool) -> Iterator[Log]:
    with closing(TensorBoardWriter(folder)) if tensorboard else nullcontext() as writer:
        yield Log(folder / "metrics.jsonl", writer=writer)


class Log:
    """Writes metrics.jsonl, one line per event. On a full disk, lines wait in memory until they can be written."""

    def __init__(self, path: Path, writer: Callable[[Tree], None] | None = None) -> None:
        self.path, self.writer = path, writer
        self.pending_lines, self.last_write_failed, self.is_created = list[str](), False, False

    def add(self, event: Event) -> str | None:
        """Writes an event: its name in snake case and its fields. Returns the error of the first write that fails."""
        line = {"event": re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()} | asdict(event)
        self.pending_lines.append(json.dumps(to_jsonable_python(line, inf_nan_mode="null")) + "\n")
        failed_before, self.last_write_failed = self.last_write_failed, True
        try:
            append_atomic(self.path, "".join(self.pending_lines).encode(), create=not self.is_created)
            self.is_created = True
            self.pending_lines.clear()
            if self.writer is not None:
                self.writer(line)
        except OSError as error:
            path = self.path if self.pending_lines else self.path.with_name("events.out.tfevents.*")
            message = f"cannot write {path}: {error.strerror or error}; training continues, and the write is retried"
            return None if failed_before else message
        self.last_write_failed = False
        return None

    def drop_after(self, step: int, evaluated_step: int) -> None:
        """Removes lines of steps and evaluations that will be repeated, and a line that a crash left incomplete."""
        if self.path.exists():
            with explain_write_errors(self.path):
                last_steps = {"evaluated": evaluated_step}
                events = (
                    event for event in read_events(self.path) if event["step"] <= last_steps.get(event["event"], step)
                )
                write_atomic(self.path, "".join(f"{json.dumps(event)}\n" for event in events))


def read_events(path: Path) -> Iterator[Tree]:
    """Yields the events of metrics.jsonl, without a line that a crash left incomplete.

    Raises OSError if it is no regular file, or if a line is too long for an event, as that of a sparse file.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        while line := file.readline(MAX_EVENT_BYTES + 1):
            if len(line) > MAX_EVENT_BYTES:
                raise OSError(errno.EINVAL, f"has a line of more than {MAX_EVENT_BYTES:,} bytes", str(path))
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event and type(event.get("step")) is int:
                    yield event


class TensorBoardWriter:
    """Writes one event file per launch; its first record makes TensorBoard drop later steps of earlier files.

    tensorboardX's own writer has a thread, which a full disk kills with a traceback; here the caller gets the error.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("train.tensorboard needs tensorboardX", "log"):
            from tensorboardX import event_file_writer, proto, summary  # noqa: F401
            from tensorboardX.proto import event_pb2
        self.file: Any = None
        self.prefix, self.new_file = str(folder / "events"), event_file_writer.EventsWriter
        self.event, self.session, self.scalar = event_pb2.Event, event_pb2.SessionLog, summary.scalar

    def __call__(self, line: Tree) -> None:
        if line["event"] == "evaluated":
            scalars = {f"validation/{name}": value for name, value in line["metrics"].items()}
        elif line["event"] == "step":
            scalars = {f"train/{name}": line[name] for name in ("loss", "lr", "grad_norm")}
            scalars["train/tokens_per_second"] = line["tokens"] / max(line["seconds"], 1e-9)
        else:
            return
        if self.file is None:
            self.file = self.new_file(self.prefix, filename_suffix=f".{os.getpid()}.{line['step']}")
            self.write(line["step"], session_log=self.session(status=self.session.START))
        for name, value in scalars.items():
            self.write(line["step"], summary=self.scalar(name, value))
        self.file.flush()

    def write(self, step: int, **fields: Any) -> None:
        self.file.write_event(self.event(wall_time=time.time(), step=step, **fields))

    def close(self) -> None:
        with suppress(OSError):
            if self.file is not None:
                self.file.close()
