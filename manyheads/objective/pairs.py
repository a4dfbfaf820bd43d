"""Learning from pairs: a target, given its source; a document, found by its query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.objective.score import Batch, ObjectiveSpec, Row, Score, Tokens, answered, padded
from manyheads.parts.batch import Inputs
from manyheads.parts.head import Pool
from manyheads.spec import SpecError, field


class Seq2SeqSpec(ObjectiveSpec, kind="seq2seq"):
    """−Σ log p(y_t | y_<t, x), the end of a target included

    With smoothing ε, (1 − ε) of the weight is on y_t and ε is spread over all tokens: Szegedy et al. 2016, arXiv 1512.00567.
    """

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    shapes: ClassVar[tuple[str, ...]] = ("encoder–decoder", "recurrent")
    frame: ClassVar[str] = "$A </s>"

    smoothing: float = field(0.0, "ε, spread over all tokens", ge=0, lt=1)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        return answered([(source, target) for source, target in rows], tokens, self.frame)

    @property
    def softened(self) -> float:
        return self.smoothing

    @property
    def unsoftened(self) -> ObjectiveSpec:
        return self.changed(smoothing=0.0)


class ContrastiveSpec(ObjectiveSpec, kind="contrastive"):
    """−log softmax_j(cos(q_i, d_j) / τ) at j = i: a query's own document among all of the batch

    van den Oord et al. 2018, arXiv 1807.03748. A document that stands in the batch twice, and that of a query that does, is right for
    both and no negative. The vectors are the head's; without a head, the means over the real tokens, or what the folder says that a
    run began from. As the other rows are the negatives, an update from several batches is not that from one large one. Pairs of source
    and target are read the same way.
    """

    fields: ClassVar[tuple[str, ...]] = ("query", "document")
    shapes: ClassVar[tuple[str, ...]] = ("encoder",)
    frame: ClassVar[str] = "<s> $A </s>"
    added: ClassVar[int] = 2

    temperature: float = field(0.05, "τ", gt=0)
    symmetric: bool = field(False, "whether each document also looks for its query; the mean of both is taken")

    def reads(self, given: Sequence[str]) -> tuple[str, ...]:
        return ("source", "target") if "source" in given else self.fields

    def check(self, model: ModelSpec) -> None:
        if model.head.kind not in ("vector", "none"):
            raise SpecError(
                f"{self.kind} compares vectors, and the head '{model.head.kind}' gives none; take vector or none", ("model", "head")
            )

    def check_tokens(self, tokens: Tokens, model: ModelSpec) -> None:
        if tokens.pool is None:
            return
        if model.head.kind == "vector":
            raise SpecError("the files of the checkpoint say how a text becomes one vector, and are followed; take none", ("model", "head"))
        tokens.pool(torch.zeros(1, 1, 1), None)  # files that cannot be followed say so here, before anything is learned

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        columns = zip(*rows, strict=True)
        queries, documents = (padded([tokens.framed(text, self.frame) for text in texts], tokens.pad) for texts in columns)
        return Batch(queries, torch.arange(len(rows)), source=documents, pool=tokens.pool)

    def score(self, model: Model, batch: Batch) -> Score:
        assert batch.source is not None
        queries, documents = (vectors(model, texts, batch.pool) for texts in (batch.inputs, batch.source))
        logits = queries @ documents.T / self.temperature
        same = alike(batch.inputs.tokens) | alike(batch.source.tokens)
        logits = logits.masked_fill(same.fill_diagonal_(False), -torch.inf)
        total = F.cross_entropy(logits, batch.wanted, reduction="sum")
        if self.symmetric:
            total = (total + F.cross_entropy(logits.T, batch.wanted, reduction="sum")) / 2
        return Score(total, len(batch.wanted), int((logits.detach().argmax(dim=-1) == batch.wanted).sum()))


def vectors(model: Model, inputs: Inputs, pool: Pool | None) -> Tensor:
    """A vector of length one for each text, B×D: the one that whoever loads the model is given."""
    assert isinstance(model, Transformer)
    return F.normalize(model.vectors(inputs, pool).float(), dim=-1)


def alike(tokens_BL: Tensor) -> Tensor:
    """Which rows are the same, B×B."""
    return (tokens_BL[:, None] == tokens_BL[None]).all(dim=-1)
