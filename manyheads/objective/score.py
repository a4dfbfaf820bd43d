"""Batches and scores. A score is a sum and a count, divided once at the end: so accumulation, padding and uneven shares are exact."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import field as made
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.parts.batch import Inputs
from manyheads.parts.head import Pool
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
    count: int = 5  # of all tokens
    special: tuple[int, ...] = (0, 1, 2, 3, 4)  # those that no text is made of
    start: int | None = None  # what begins an answer, where it is not `begin`
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # what stands before and behind every text, where a tokenizer says so
    extra: tuple[int, ...] = ()  # those that the objective asked for
    pool: Pool | None = None  # what makes one vector of a text's, where the files of a checkpoint say so

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The tokens that texts are made of."""
        return np.setdiff1d(np.arange(self.count), self.special)

    def framed(self, text: np.ndarray, frame: str) -> np.ndarray:
        """A text with what stands around it: as the tokenizer says, or as in the frame, <s> and </s> around $A."""
        before, behind = self.ends(frame)
        framed = np.concatenate((before, text, behind)).astype(np.int64)
        return framed if len(framed) else np.array([self.begin])

    def ends(self, frame: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before a text and behind it."""
        if self.around is not None:
            return self.around
        ids = {"<s>": self.begin, "</s>": self.end}
        before, behind = (tuple(ids[name] for name in part.split()) for part in frame.split("$A"))
        return before, behind

    def answer(self, text: np.ndarray, frame: str) -> np.ndarray:
        """A text as it is to be written: framed, and ended in any case."""
        framed = self.framed(text, frame)
        return framed if framed[-1] == self.end or self.around is None else np.append(framed, self.end)

    @property
    def opening(self) -> tuple[int, ...]:
        """What an answer begins with before its first own token."""
        return (self.begin if self.start is None else self.start, *(self.around[0] if self.around else ()))


@dataclass(frozen=True)
class Batch:
    """What a model reads and what it should say: a class or token for every place, NOTHING where it may say what it likes.

    A text given its source; a query and in `source` its document; a picture and in `source` what is shown of it.
    """

    inputs: Inputs
    wanted: Tensor
    source: Inputs | None = None
    pool: Pool | None = None  # what makes one vector of a text's, where it is not for the model to say
    links: dict[str, Tensor] = made(default_factory=dict)  # of guided attention, N×3: a text, the place that looks, where it should look

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device, with all that it holds."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Inputs)}
        return replace(self, **moved, links={name: value.to(device) for name, value in self.links.items()})

    @property
    def tokens(self) -> int:
        """How many places were computed, real ones."""
        given = [self.inputs] if self.source is None else [self.inputs, self.source]
        return sum(one.batch * one.length if one.padding is None else int((~one.padding).sum()) for one in given)


def answered(pairs: Sequence[tuple[np.ndarray, np.ndarray]], tokens: Tokens, frame: str) -> Batch:
    """Texts that are read and those that are to be written, each framed; one is written behind what begins every answer."""
    source = [tokens.framed(text, frame) for text, _ in pairs]
    wanted = [tokens.answer(text, frame) for _, text in pairs]
    given = [np.concatenate((tokens.opening[:1], text[:-1])) for text in wanted]
    return Batch(padded(given, tokens.pad), asked(wanted), source=padded(source, tokens.pad))


@dataclass(frozen=True)
class Score:
    """A loss summed over what was asked, how much that was, and how often the first guess was right, where it can be; terms beside."""

    total: Tensor
    count: int
    right: int | None = 0
    terms: dict[str, Score] = made(default_factory=dict)

    @property
    def mean(self) -> float:
        return float(self.total.detach()) / max(1, self.count)


class ObjectiveSpec(Part, slot="objective"):
    """What a model is trained for."""

    fields: ClassVar[tuple[str, ...]]  # which the data must have
    shapes: ClassVar[tuple[str, ...]]  # of the models that can learn it
    frame: ClassVar[str]  # what stands around a text that a model is given to read, $A
    added: ClassVar[int] = 1  # how many tokens that, or what it writes, is longer than the text
    guesses: ClassVar[bool] = True  # whether a guess can be right

    def reads(self, given: Sequence[str]) -> tuple[str, ...]:
        """Which of the fields that data has are learned from."""
        return self.fields

    @property
    def figures(self) -> tuple[str, ...]:
        """What a look at unseen rows gives."""
        return ("loss", *(("accuracy",) if self.guesses else ()), *(("exact",) if self.fields == ("source", "target") else ()))

    def extra(self) -> tuple[str, ...]:
        """Tokens of its own that a tokenizer must have."""
        return ()

    def check(self, model: ModelSpec) -> None:
        """Refuses a model whose head does not say what is asked."""
        if not model.head.scores_tokens:
            said = f"{self.kind} asks for tokens, and the head '{model.head.kind}' scores none; take tied, free or masked"
            raise SpecError(said, ("model", "head"))

    def check_tokens(self, tokens: Tokens, model: ModelSpec) -> None:
        """Refuses a tokenizer, or what else is known of a checkpoint's texts, that does not give what is asked."""

    @abstractmethod
    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch: ...

    def length(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """How many places a row takes, rows × fields, given the lengths of its fields."""
        return np.stack(lengths, axis=1) + self.added

    def before(self, tokens: Tokens) -> int:
        """How many tokens stand before a text's own."""
        return len(tokens.ends(self.frame)[0])

    def room(self, tokens: Tokens) -> int:
        """How many places a text takes beyond its own."""
        return max(self.added, len(tokens.around[0]) + max(1, len(tokens.around[1])) if tokens.around else 0)

    def score(self, model: Model, batch: Batch) -> Score:
        """Cross-entropy of what is wanted."""
        asked = batch.wanted != NOTHING
        return cross_entropy(model(batch.inputs, batch.source, at=asked), batch.wanted[asked], self.softened)

    @property
    def softened(self) -> float:
        return 0.0

    @property
    def unsoftened(self) -> ObjectiveSpec:
        """As unseen rows are scored, without what only helps to learn."""
        return self


def cross_entropy(logits_NV: Tensor, wanted: Tensor, smoothing: float = 0.0) -> Score:
    total = F.cross_entropy(logits_NV.float(), wanted, reduction="sum", label_smoothing=smoothing)
    right = int((logits_NV.detach().argmax(dim=-1) == wanted).sum())
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
