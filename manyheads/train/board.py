"""What TensorBoard shows of a run: event files beside its metrics, written as things happen."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manyheads.spec import SpecError, Tree
from manyheads.train.log import Log
from manyheads.train.run import TrainSpec

SHOWN = ("loss", "rate", "gradient")  # of every step


@contextmanager
def following(how: TrainSpec, folder: Path) -> Iterator[Log]:
    """Where events are written down: lines, and a board where one is asked for."""
    board = Board(folder) if how.tensorboard else None
    try:
        yield Log(folder / "metrics.jsonl", also=board)
    finally:
        if board is not None:
            board.close()


class Board:
    """One event file a start. It begins by saying from which step on earlier ones do not hold, so that no step is shown twice.

    tensorboardX's own writer has a thread, which a full disk kills with a traceback; here a write that fails is said by who called.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import event_file_writer, proto, summary  # noqa: F401
            from tensorboardX.proto import event_pb2
        except ImportError:
            raise SpecError("needs tensorboardX: pip install 'manyheads[log]'", ("train", "tensorboard")) from None
        self.writer: Any = None
        self.prefix, self.open = str(folder / "events"), event_file_writer.EventsWriter
        self.event, self.session, self.scalar = event_pb2.Event, event_pb2.SessionLog, summary.scalar

    def __call__(self, line: Tree) -> None:
        """Writes what an event has to show."""
        if line["event"] not in ("stepped", "evaluated"):
            return
        step = line["step"]
        if self.writer is None:
            self.writer = self.open(self.prefix, filename_suffix=f".{os.getpid()}.{step}")
            self.write(step, session_log=self.session(status=self.session.START))
        if line["event"] == "evaluated":
            shown = {f"unseen/{name}": value for name, value in line["metrics"].items()}
        else:
            shown = {f"train/{name}": line[name] for name in SHOWN}
            shown["train/tokens_per_second"] = line["tokens"] / max(line["seconds"], 1e-9)
        for name, value in shown.items():
            self.write(step, summary=self.scalar(name, value))
        self.writer.flush()

    def write(self, step: int, **what: Any) -> None:
        self.writer.write_event(self.event(wall_time=time.time(), step=step, **what))

    def close(self) -> None:
        with suppress(OSError):
            if self.writer is not None:
                self.writer.close()
