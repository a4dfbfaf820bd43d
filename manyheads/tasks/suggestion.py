"""The lines that `manyheads new` writes for a model and its task, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyheads.data.source import NON_TEXT_FIELDS, Corpus, DataSpec
from manyheads.spec import Tree
from manyheads.tasks.task import TaskSpec

Lines = list[tuple[str, Any, str]]  # key, value, reason


@dataclass(frozen=True)
class ModelSize:
    """A model size, for training data of at most `max_tokens`."""

    layers: int
    width: int
    heads: int
    max_tokens: float


SIZES = (ModelSize(2, 64, 4, 3e5), ModelSize(3, 128, 4, 3e6), ModelSize(4, 256, 8, 3e7), ModelSize(6, 512, 8, math.inf))


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What `manyheads new` knows when it suggests the model and task tables."""

    task: type[TaskSpec]
    architecture: str
    corpus: Corpus
    data: DataSpec
    size: ModelSize = SIZES[0]
    epochs: float = 1.0
    max_row_length: int = 0  # in tokens; 0 until it is known

    @property
    def text_fields(self) -> list[str]:
        return [name for name in self.corpus.fields if name not in NON_TEXT_FIELDS]

    def model(self) -> Lines:
        vocab: Lines = [("vocab", "tokenizer", "the tokenizer's number of tokens")] if self.text_fields else []
        why = (
            "with smaller initial weights, models with sinusoids learn much later"
            if self.position == "sinusoidal"
            else ""
        )
        return [*vocab, *self.task.suggest_head(self), ("init", "xavier", why)]

    @property
    def position(self) -> str | None:
        return {"recurrent": None, "ngram": None, "decoder": "rope"}.get(self.architecture, "sinusoidal")

    @property
    def residual(self) -> tuple[Any, str]:
        if self.epochs <= 5:
            return "pre", ""
        return {"kind": "pre", "dropout": 0.1}, f"dropout, because each row is seen {self.epochs:.3g} times"

    def text_stacks(self) -> Iterator[tuple[str, Lines]]:
        size = self.size
        if self.architecture == "recurrent":
            source: Lines = [] if self.task.has_source else [("source", False, "the task has no source")]
            yield "model.recurrent", [("width", size.width, "for this much data"), *source]
            return
        if self.architecture == "ngram":
            yield (
                "model.ngram",
                [("order", 4, "predicts from three tokens"), ("width", size.width, "for this much data")],
            )
            return
        first, _, second = self.architecture.partition("-")
        embed = {"kind": "tokens", "scale": True}
        yield f"model.{first}", self.stack(embed=embed, why_embed="times √width", position=self.position)
        if second:
            yield (
                "model.decoder",
                [
                    ("like", "encoder", "everything above, except for"),
                    ("embed", {"kind": "shared", "scale": True}, "one token embedding for both"),
                    ("cross", True, "attends to the encoder's output"),
                ],
            )

    def stack(self, *, embed: Tree, why_embed: str, position: Any, activation: str = "relu") -> Lines:
        size, sizes = self.size, ", ".join(str(one.width) for one in SIZES)
        return [
            ("layers", size.layers, ""),
            ("width", size.width, f"for this much data; the sizes are {sizes}"),
            ("embed", embed, why_embed),
            ("position", position, "manyheads show position lists others"),
            ("attention", {"kind": "heads", "heads": size.heads}, ""),
            ("feedforward", {"kind": "mlp", "hidden": 4 * size.width, "activation": activation}, ""),
            ("residual", *self.residual),
        ]
