"""The table of tasks in docs/training.md has every task, with the architectures that can learn it."""

from __future__ import annotations

import re
from pathlib import Path

import manyheads.tasks  # noqa: F401  (fills the slot)
from manyheads.tasks.task import TaskSpec

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_table_has_every_task_with_its_shapes():
    table = re.search(
        r"\| task \| columns \| architectures \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8")
    )[1]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()]
    architectures = {
        task: tuple(row[2].strip().replace("n-gram", "ngram").split(", "))
        for row in rows
        for task in re.findall(r"`([\w-]+)`", row[0])
    }
    built_in = {kind: spec for kind, spec in TaskSpec.kinds.items() if spec.__module__.startswith("manyheads.")}
    assert architectures == {kind: spec.architectures for kind, spec in built_in.items()}
