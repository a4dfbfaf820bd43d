"""Everything that can happen in a run: the loop yields these events, and each is one line of metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A field whose value is not the one that the folder's run had."""

    field: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Prepared:
    """A start of the run: what it is trained on, and on which device."""

    step: int
    data: str
    device: str


@dataclass(frozen=True)
class Initialized:
    """Weights were loaded from a checkpoint: how many, which are new, and which of the checkpoint are unused."""

    step: int
    loaded: int
    new: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Truncated:
    """How many rows of each split were longer than train.max_length, or than the model, and were truncated."""

    step: int
    train_rows: int
    validation_rows: int


@dataclass(frozen=True)
class Resumed:
    """The run continues from a checkpoint; `warnings` says why newer ones were not used."""

    step: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One optimizer step; `skipped` if the loss or a gradient was NaN or infinite, so that no weight changed."""

    step: int
    loss: float
    lr: float
    grad_norm: float  # before clipping
    tokens: int
    seconds: float
    skipped: bool = False
    terms: dict[str, float] = field(default_factory=dict)  # the mean of each auxiliary loss
    rows: tuple[int, ...] = ()  # indices of the training rows, of a skipped step only


@dataclass(frozen=True)
class Evaluated:
    """Metrics on the validation set."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written. Earlier ones are untouched, and the run continues until the next save."""

    step: int
    message: str
    failures: int  # in a row


@dataclass(frozen=True)
class ConfigChanged:
    """The run continues although these fields changed."""

    step: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Warned:
    """Something is wrong that does not stop the run."""

    step: int
    message: str


@dataclass(frozen=True)
class Finished:
    """The run ended; the reason is a key of EXIT_STATUS: a field of [train] or train.best, or a signal."""

    step: int
    reason: str
    metrics: dict[str, float | None] = field(default_factory=dict)  # of the last evaluation; None for NaN


Event = (
    Prepared | Initialized | Truncated | Resumed | Step | Evaluated
    | Saved | SaveFailed | ConfigChanged | Warned | Finished
)  # fmt: skip
