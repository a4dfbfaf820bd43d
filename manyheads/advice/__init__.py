"""A run file for a task and the user's data: shape, size, tokenizer, batch and steps, chosen for both and for the machine, saying why."""

from __future__ import annotations

from pathlib import Path

from manyheads.advice.draft import Draft
from manyheads.advice.fit import fitted
from manyheads.advice.task import ALSO, TASKS, chosen_shape, data_of
from manyheads.spec import SpecError, nearest, quoted

__all__ = ["MINUTES", "TASKS", "new"]

MINUTES = 30.0


def new(
    task: str, file: Path | None = None, *, shape: str | None = None, fields: str | None = None, minutes: float = MINUTES
) -> tuple[str, list[str]]:
    """A run file as text, and the reasons as lines."""
    if not 0 < minutes <= 60 * 24 * 365:
        raise SpecError(f"--minutes is {minutes:g}, expected some, at most a year of them")
    name = ALSO.get(task, task)
    if name not in TASKS:
        raise SpecError(f"no task {quoted(task)}{nearest(task, TASKS)}")
    return fitted(Draft(name, chosen_shape(name, shape), data_of(name, file, fields), minutes)).text_and_reasons()
