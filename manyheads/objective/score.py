"""Batches and scores. A score is a sum and a count, divided once at the end: so accumulation, padding and uneven shares are exact."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.parts.batch import Inputs
from manyheads.spec import Part, SpecError

Row = tuple[np.ndarray, ...]  # by field: ids, the number of a class, or a picture as patches, L×pixels
NOTHING = -100  # stands where nothing is asked


@dataclass(frozen=True)
class Tokens:
    """The ids that an objective adds to a text."""

    pad: int = 0
    begin: int = 1
    end: int = 2
    unknown: int = 3
    mask: int = 4
    count: int = 5  # of all tokens; the first five are these
    extra: tuple[int, ...] = ()  # those that the objective asked for


@dataclass(frozen=True)
class Batch:
    """What a model reads and what it should say: a class or token for every place, NOTHING where it may say what it likes.

    A text given its source; a query and in `source` its document; a picture and in `source` what is shown of it.
    """

    inputs: Inputs
    wanted: Tensor
    source: Inputs | None = None

    @property
    def tokens(self) -> int:
        """How many places were computed, real ones."""
        given = [self.inputs] if self.source is None else [self.inputs, self.source]
        return sum(one.batch * one.length if one.padding is None else int((~one.padding).sum()) for one in given)


@dataclass(frozen=True)
class Score:
    """A loss summed over what was asked, how much that was, and how often the first guess was right, where one can be."""

    total: Tensor
    count: int
    right: int | None = 0

    @property
    def mean(self) -> float:
        return float(self.total.detach()) / max(1, self.count)


class ObjectiveSpec(Part, slot="objective"):
    """What a model is trained for."""

    fields: ClassVar[tuple[str, ...]]  # which the data must have
    shapes: ClassVar[tuple[str, ...]]  # of the models that can learn it
    frame: ClassVar[str]  # what stands around a text that a model is given to read, $A
    added: ClassVar[int] = 1  # how many tokens that, or what it writes, is longer than the text

    def reads(self, given: Sequence[str]) -> tuple[str, ...]:
        """Which of the fields that data has are learned from."""
        return self.fields

    def extra(self) -> tuple[str, ...]:
        """Tokens of its own that a tokenizer must have."""
        return ()

    def check(self, model: ModelSpec) -> None:
        """Refuses a model whose head does not say what is asked."""
        if not model.head.scores_tokens:
            raise SpecError(f"{self.kind} asks for tokens, and the head '{model.head.kind}' scores none", ("model", "head"))

    @abstractmethod
    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch: ...

    def length(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """How many places a row takes, for each row, given the lengths of its fields."""
        return np.maximum.reduce([np.asarray(one) for one in lengths]) + self.added

    def score(self, model: Model, batch: Batch) -> Score:
        """Cross-entropy of what is wanted."""
        logits = model(batch.inputs) if batch.source is None else model(batch.inputs, batch.source)
        return cross_entropy(logits, batch.wanted, self.softened)

    @property
    def softened(self) -> float:
        return 0.0


def cross_entropy(logits: Tensor, wanted: Tensor, smoothing: float = 0.0) -> Score:
    asked = wanted != NOTHING
    logits, wanted = logits[asked], wanted[asked]  # places where nothing is asked cost nothing
    total = F.cross_entropy(logits.float(), wanted, reduction="sum", label_smoothing=smoothing)
    right = int((logits.detach().argmax(dim=-1) == wanted).sum())
    return Score(total, wanted.numel(), right)


def padded(rows: Sequence[Sequence[int] | np.ndarray], pad: int) -> Inputs:
    """Rows side by side, filled up on the right."""
    longest = max(len(row) for row in rows)
    ids = np.full((len(rows), longest), pad, dtype=np.int64)
    padding = np.ones((len(rows), longest), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], padding[i, : len(row)] = row, False
    return Inputs(torch.from_numpy(ids), padding=torch.from_numpy(padding) if padding.any() else None)


def asked(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """Rows of what is wanted, filled up with NOTHING."""
    return padded(rows, NOTHING).tokens
