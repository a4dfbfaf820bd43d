"""The lines that `manyheads new` writes for a model and its task, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyheads.data.source import NON_TEXT_FIELDS, Corpus, DataSpec
from manyheads.tasks.task import TaskSpec

SHOW_POSITIONS = "manyheads show position lists others"
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
    def stacks(self) -> tuple[str, ...]:
        """The tables of a transformer; none for another architecture."""
        return tuple(name for name in self.architecture.split("-") if name in ("encoder", "decoder"))

    @property
    def text_fields(self) -> list[str]:
        return [name for name in self.corpus.fields if name not in NON_TEXT_FIELDS]

    def model(self) -> Lines:
        vocab: Lines = [("vocab", "tokenizer", "the tokenizer's number of tokens")] if self.text_fields else []
        reason = "with smaller initial weights, small models learn much later"
        return [*vocab, *self.task.suggest_head(self), ("init", "xavier", reason)]

    @property
    def residual(self) -> tuple[Any, str]:
        if self.epochs <= 5:
            return "pre", ""
        return {"kind": "pre", "dropout": 0.1}, f"dropout, because each row is seen {self.epochs:.3g} times"

    def text_stacks(self) -> Iterator[tuple[str, Lines]]:
        if not self.stacks:
            yield f"model.{self.architecture}", self.stepwise_model()
            return
        first, *second = self.stacks
        embed: Lines = [("embed", {"kind": "tokens", "scale": True}, "times √width")]
        if not second:
            yield f"model.{first}", self.stack(*embed, *self.gated_layers())
        else:
            sinusoids = {"kind": "sinusoidal", "layout": "halves"}
            yield f"model.{first}", self.stack(*embed, *self.plain_layers(sinusoids, activation="relu"))
            yield (
                "model.decoder",
                [
                    ("like", "encoder", "everything above, except for"),
                    ("embed", {"kind": "shared", "scale": True}, "one token embedding for both"),
                    ("cross", True, "attends to the encoder's output"),
                ],
            )

    def stepwise_model(self) -> Lines:
        """The table of a model that is no transformer."""
        width = ("width", self.size.width, "for this much data")
        if self.architecture == "ngram":
            return [("order", 4, "predicts from three tokens"), width]
        return [width] if self.task.has_source else [width, ("source", False, "the task has no source")]

    def stack(self, *lines: tuple[str, Any, str]) -> Lines:
        sizes = ", ".join(str(size.width) for size in SIZES)
        reason = f"for this much data; the sizes are {sizes}"
        return [
            ("layers", self.size.layers, ""),
            ("width", self.size.width, reason),
            *lines,
            ("residual", *self.residual),
        ]

    def gated_layers(self) -> Lines:
        """The layers of most recent decoders and encoders, which other libraries have, too."""
        hidden = 32 * round(8 * self.size.width / 3 / 32)
        return [
            ("position", "rope", SHOW_POSITIONS),
            ("attention", {"kind": "heads", "heads": self.size.heads, "bias": False, "output_bias": False}, ""),
            ("feedforward", {"kind": "gated", "hidden": hidden, "activation": "silu"}, "about 8/3 of the width"),
            ("norm", "rms", ""),
        ]

    def plain_layers(self, position: Any, *, activation: str) -> Lines:
        return [
            ("position", position, SHOW_POSITIONS),
            ("attention", {"kind": "heads", "heads": self.size.heads}, ""),
            ("feedforward", {"kind": "mlp", "hidden": 4 * self.size.width, "activation": activation}, ""),
        ]
