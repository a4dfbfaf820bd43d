"""The events of a run. The loop yields them, and each is one line of metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A field of the run that changed since the folder's run was started."""

    field: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, after this many optimizer steps."""

    step: int


@dataclass(frozen=True)
class Prepared(Event):
    """The data was prepared, and the run starts on this device."""

    data: str
    device: str


@dataclass(frozen=True)
class Initialized(Event):
    """Weights were loaded from a checkpoint; `missing_keys` are not in it, `unexpected_keys` are not in the model."""

    loaded: int
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Truncated(Event):
    """Rows longer than train.max_length, or than the model's limit, were truncated."""

    train_rows: int
    validation_rows: int


@dataclass(frozen=True)
class Resumed(Event):
    """The run continues from a checkpoint; `warnings` says why newer ones were not used."""

    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step(Event):
    """One optimizer step; `skipped` if the loss or a gradient was NaN or infinite, so that no weight changed."""

    loss: float
    lr: float
    grad_norm: float  # before clipping
    tokens: int
    seconds: float
    skipped: bool = False
    auxiliary_losses: dict[str, float] = field(default_factory=dict)  # mean of each auxiliary loss
    rows: tuple[int, ...] = ()  # indices of the training rows, only of a skipped step


@dataclass(frozen=True)
class Evaluated(Event):
    """Metrics on the validation set."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint was written."""

    path: str


@dataclass(frozen=True)
class SaveFailed(Event):
    """A checkpoint could not be written. Earlier ones are untouched, and the run continues until the next save."""

    message: str
    failures: int  # consecutive failed saves


@dataclass(frozen=True)
class ConfigChanged(Event):
    """The run continues although these fields changed."""

    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Warned(Event):
    """Something is wrong, but the run continues."""

    message: str


@dataclass(frozen=True)
class Finished(Event):
    """The run ended; `reason` is steps, stop_at or patience, or for a signal interrupted or terminated."""

    reason: str
    metrics: dict[str, float | None] = field(default_factory=dict)  # metrics of the last evaluation; None for NaN
