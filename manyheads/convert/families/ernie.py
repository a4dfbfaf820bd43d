"""ERNIE 2.0 (Sun et al. 2020) and 3.0 (Sun et al. 2021): BERT's layers, with task types from 3.0 on."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.convert.config import Config, Fields, GetField
from manyheads.convert.families import Family
from manyheads.convert.families.bert import BASE, IGNORED, KEYS, LENGTH, WEIGHTS, architectures, dropout
from manyheads.spec import Tree


@dataclass(frozen=True)
class TaskTypes:
    """The number of task types; 0 without task type embeddings."""

    keys: tuple[str, ...] = ("use_task_id", "task_type_vocab_size")

    def read(self, config: Config) -> Fields:
        return {
            "encoder.embed.task_type_vocab_size": config.get("task_type_vocab_size", 3)
            if config.get("use_task_id", False)
            else 0
        }

    def write(self, get: GetField) -> Tree:
        count = get("encoder.embed.task_type_vocab_size")
        return {"use_task_id": True, "task_type_vocab_size": count} if count else {"use_task_id": False}


FAMILIES = {
    "ernie": Family(
        "ernie",
        BASE,
        keys=(*KEYS, LENGTH, *dropout(0.1), TaskTypes()),
        weights=WEIGHTS,
        architectures=architectures("Ernie", "ernie."),
        ignored=IGNORED,
    )
}
