"""ERNIE 2.0 (Sun et al. 2020) and 3.0 (Sun et al. 2021): the tower of its neighbour, with task types from 3.0 on."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.convert.config import Config, Look, Placed
from manyheads.convert.families import Family
from manyheads.convert.families.bert import KEYS, LENGTH, SHAPE, SILENT, dropout, tasks, tower
from manyheads.spec import Tree


@dataclass(frozen=True)
class TaskTypes:
    """How many task types have a vector, where they are in use at all."""

    keys: tuple[str, ...] = ("use_task_id", "task_type_vocab_size")

    def read(self, config: Config) -> Placed:
        return {"encoder.embed.tasks": config.get("task_type_vocab_size", 3) if config.get("use_task_id", False) else 0}

    def write(self, look: Look) -> Tree:
        count = look("encoder.embed.tasks")
        return {"use_task_id": True, "task_type_vocab_size": count} if count else {"use_task_id": False}


FAMILIES = {
    "ernie": Family(
        "ernie", SHAPE, keys=(*KEYS, LENGTH, *dropout(0.1), TaskTypes()), table=tower, tasks=tasks("Ernie", "ernie."), silent=SILENT
    )
}
