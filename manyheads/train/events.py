"""What happens in a run, as the loop yields it: for the terminal, for metrics.jsonl, for whoever listens."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as made

from manyheads.train.folder import Change


@dataclass(frozen=True)
class Started:
    """A run begins from a checkpoint: how many weights are taken, which are new, which of its own are left out, and more to know."""

    step: int
    taken: int
    new: tuple[str, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shortened:
    """How many rows, to learn from and unseen, were longer than they may be, and were cut."""

    step: int
    rows: int
    unseen: int


@dataclass(frozen=True)
class Resumed:
    """A run goes on; checkpoints that were not sound are named."""

    step: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """One update, or one that was left out because its loss or gradient was NaN or infinite."""

    step: int
    loss: float
    rate: float
    gradient: float
    tokens: int
    seconds: float
    skipped: bool = False
    terms: dict[str, float] = made(default_factory=dict)
    rows: tuple[int, ...] = ()  # those of the update, where it was left out


@dataclass(frozen=True)
class Evaluated:
    """A look at unseen rows."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Saved:
    """A checkpoint is in its place."""

    step: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written. Those before are untouched; the run goes on, and the next is tried in its turn."""

    step: int
    said: str
    times: int  # in a row


@dataclass(frozen=True)
class Changed:
    """A run goes on with fields that were others before: each with its old and new value."""

    step: int
    fields: tuple[Change, ...]


@dataclass(frozen=True)
class Warned:
    """Something is not as it should be, and the run goes on."""

    step: int
    said: str


@dataclass(frozen=True)
class Ended:
    """Why a run ended: its last step, its goal, its patience, or somebody asked."""

    step: int
    reason: str


Event = Started | Shortened | Resumed | Stepped | Evaluated | Saved | SaveFailed | Changed | Warned | Ended
