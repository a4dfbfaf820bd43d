"""What an open page holds: the forward passes that it shows, bounded in number and memory, and freed when it closes."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import ExpiredError, UsageError
from manyheads.inspect.probe import hash_weights
from manyheads.studio.views import ForwardPass

if TYPE_CHECKING:
    from manyheads.studio.probe import RunningProbe
    from manyheads.studio.run_checkpoints import RunCheckpoints

MAX_SESSIONS, MAX_FORWARD_PASSES = 8, 6
MAX_BYTES = 2 << 30  # of the tensors of all forward passes of a session
IDLE_SECONDS = 3600.0


class CheckpointRequest(BaseModel):
    """A request of a page for one of the open checkpoints."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session: str = Field(max_length=64)
    checkpoint: int = Field(0, ge=0, le=64)
    step: int | None = Field(None, ge=0, le=1 << 20)  # index of a checkpoint of the run, instead of `checkpoint`


@dataclass
class Session:
    """The forward passes of one page; those that were not used for the longest time go first."""

    forward_passes: OrderedDict[str, ForwardPass] = field(default_factory=OrderedDict)
    used: float = field(default_factory=time.monotonic)
    probe: RunningProbe | None = None  # of the tab Probe, fitted layer by layer

    def add(self, forward_pass: ForwardPass) -> str:
        key = secrets.token_hex(8)
        self.forward_passes[key] = forward_pass
        while len(self.forward_passes) > 1 and (
            len(self.forward_passes) > MAX_FORWARD_PASSES
            or sum(item.num_bytes for item in self.forward_passes.values()) > MAX_BYTES
        ):
            self.forward_passes.popitem(last=False)
        return key

    def __getitem__(self, key: str) -> ForwardPass:
        try:
            self.forward_passes.move_to_end(key)
            return self.forward_passes[key]
        except KeyError:
            raise ExpiredError("this forward pass is no longer in memory; run the text again") from None

    def keep(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Drops the forward passes of all other checkpoints."""
        open_ids = {id(checkpoint) for checkpoint in checkpoints}
        for key in [key for key, item in self.forward_passes.items() if id(item.checkpoint) not in open_ids]:
            del self.forward_passes[key]


@dataclass(frozen=True)
class ShownCheckpoint:
    """A checkpoint that the page shows, by the path that the command was given."""

    checkpoint: Checkpoint
    path: str

    @cached_property
    def hash(self) -> str:
        return hash_weights(self.checkpoint.model)


class Sessions:
    """All open pages, and the checkpoints that they show. A page that is not used for an hour is closed."""

    def __init__(
        self, checkpoints: Sequence[Checkpoint], paths: Sequence[str] = (), text: str = "",
        run_checkpoints: RunCheckpoints | None = None,
    ) -> None:  # fmt: skip
        paths = [*paths, *("" for _ in checkpoints)][: len(checkpoints)]
        self.shown = [ShownCheckpoint(*pair) for pair in zip(checkpoints, paths, strict=True)]
        self.text = text
        self.run_checkpoints = run_checkpoints  # of the first checkpoint, if it is a run's
        self.lock = Lock()  # one computation at a time: they share the processor
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._opening = Lock()

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [shown.checkpoint for shown in self.shown]

    @property
    def names(self) -> list[str]:
        return [shown.path for shown in self.shown]

    def choose(self, index: int, step: int | None = None) -> ShownCheckpoint:
        """An open checkpoint, or one of the run; what pages hold of one that is no longer loaded is freed."""
        if step is None:
            if not 0 <= index < len(self.shown):
                raise UsageError(f"there is no checkpoint {index}, expected 0 to {len(self.shown) - 1}")
            return self.shown[index]
        if self.run_checkpoints is None:
            raise UsageError("the page shows no run with several checkpoints")
        shown = self.run_checkpoints[step]
        with self._opening:
            for session in self._sessions.values():
                session.keep([*self.checkpoints, *self.run_checkpoints.loaded])
        return shown

    def start(self) -> str:
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
                raise ExpiredError("the session has ended; reload the page")
            self._sessions.move_to_end(key)
            self._sessions[key].used = time.monotonic()
            return self._sessions[key]

    def __len__(self) -> int:
        return len(self._sessions)

    def _expire(self) -> None:
        now = time.monotonic()
        for key in [key for key, session in self._sessions.items() if now - session.used > IDLE_SECONDS]:
            del self._sessions[key]
