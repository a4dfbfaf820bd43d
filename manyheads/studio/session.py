"""What an open page holds: the forward passes that it shows, bounded in number and memory, and freed when it closes."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import UsageError
from manyheads.model.record import Tape

MAX_SESSIONS, MAX_RUNS = 8, 6
MAX_BYTES = 2 << 30  # of the tensors of all runs of a session
IDLE_SECONDS = 3600.0


@dataclass
class Run:
    """One recorded forward pass."""

    checkpoint: Checkpoint
    tape: Tape
    logits: Any
    data: dict[str, Any] = field(default_factory=dict)  # what the tab keeps with it

    @property
    def bytes(self) -> int:
        tensors = {
            id(t): t
            for call in self.tape
            for t in (call.query, call.key, call.value, call.output, call.bias)
            if t is not None
        }
        tensors |= {id(t): t for outputs in self.tape.outputs.values() for t in outputs}
        return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass
class Session:
    """The runs of one page; the oldest go first."""

    runs: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    used: float = field(default_factory=time.monotonic)

    def add(self, run: Run) -> str:
        key = secrets.token_hex(8)
        self.runs[key] = run
        while len(self.runs) > 1 and (
            len(self.runs) > MAX_RUNS or sum(r.bytes for r in self.runs.values()) > MAX_BYTES
        ):
            self.runs.popitem(last=False)
        return key

    def __getitem__(self, key: str) -> Run:
        if key not in self.runs:
            raise UsageError("this run is no longer held; run the text again")
        self.runs.move_to_end(key)
        return self.runs[key]


class Sessions:
    """All open pages, and the checkpoints that they show. A page that is not used for an hour is closed."""

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Sequence[str] = (), text: str = "") -> None:
        self.checkpoints, self.names, self.text = list(checkpoints), list(names), text
        self.lock = Lock()  # one forward pass at a time: they share the processor
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._opening = Lock()

    def open(self) -> str:
        with self._opening:
            self._expire()
            key = secrets.token_hex(16)
            self._sessions[key] = Session()
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            return key

    def close(self, key: str) -> None:
        with self._opening:
            self._sessions.pop(key, None)

    def __getitem__(self, key: str) -> Session:
        with self._opening:
            self._expire()
            if key not in self._sessions:
                raise UsageError("the session has ended; reload the page")
            self._sessions.move_to_end(key)
            self._sessions[key].used = time.monotonic()
            return self._sessions[key]

    def _expire(self, clock: Callable[[], float] = time.monotonic) -> None:
        for key in [key for key, one in self._sessions.items() if clock() - one.used > IDLE_SECONDS]:
            del self._sessions[key]
