"""Learning one thing of a whole text: its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from manyheads.objective.score import Batch, ObjectiveSpec, Row, Tokens, padded


class ClassifySpec(ObjectiveSpec, kind="classify"):
    """−log p(class | x)"""

    fields: ClassVar[tuple[str, ...]] = ("text", "label")
    shapes: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    frame: ClassVar[str] = "<s> $A </s>"
    added: ClassVar[int] = 2
    wants: ClassVar[Literal["classes"]] = "classes"

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        given = [tokens.framed(text, self.frame) for text, _ in rows]
        return Batch(padded(given, tokens.pad), torch.from_numpy(np.array([int(label[0]) for _, label in rows])))
