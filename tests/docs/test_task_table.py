"""The tables of tasks in the documentation have every task, with its architectures and what its evaluation writes."""

from __future__ import annotations

import re
from pathlib import Path

import manyheads.tasks  # noqa: F401  (fills the slot)
from manyheads.tasks.task import TaskSpec

DOCS = Path(__file__).parents[2] / "docs"
OUTPUTS = {"JSON lines": "rows", "a .png": "images", "none": ""}


def last_cells(page, header):
    """The last cell of the row of each task, in the table with this header."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"{header}\n")[2]
    rows = [line.strip("| ").split(" | ") for line in re.match(r"\|[-|]+\n((?:\|.*\n)+)", text)[1].splitlines()]
    return {task: row[-1] for row in rows for task in re.findall(r"`([\w-]+)`", row[0])}


def built_in():
    return {kind: spec for kind, spec in TaskSpec.kinds.items() if spec.__module__.startswith("manyheads.")}


def test_the_table_of_training_has_every_task_with_its_architectures():
    cells = last_cells("training.md", "| task | columns | architectures |")
    architectures = {task: tuple(cell.replace("n-gram", "ngram").split(", ")) for task, cell in cells.items()}
    assert architectures == {kind: spec.architectures for kind, spec in built_in().items()}


def test_the_table_of_evaluation_has_every_task_with_its_output():
    cells = last_cells("evaluating.md", "| task | metrics | baselines | `--output` |")
    assert {task: OUTPUTS[cell] for task, cell in cells.items()} == {
        kind: spec.eval_outputs for kind, spec in built_in().items()
    }
