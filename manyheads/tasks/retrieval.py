"""Retrieval: one vector per text, so that a query is near its document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import IncompatibleError, UnsupportedError
from manyheads.metrics import metric
from manyheads.metrics.baselines import BM25
from manyheads.metrics.ranking import chance_level, rank_targets
from manyheads.model.builder import Model
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import as_transformer
from manyheads.parts.head import Pool
from manyheads.parts.inputs import Inputs, pad_rows
from manyheads.spec import Tree, field
from manyheads.tasks.batch import Batch, EncodedRow, Loss, SpecialTokens
from manyheads.tasks.evaluation import EvalResult, Evaluation
from manyheads.tasks.prediction import PredictOptions
from manyheads.tasks.suggestion import Lines, Suggestion
from manyheads.tasks.task import TaskSpec


class RetrievalSpec(TaskSpec, kind="retrieval"):
    """Contrastive retrieval with in-batch negatives (InfoNCE): −log softmax_j(cos(q_i, d_j) / τ) at j = i

    van den Oord et al. 2018, arXiv 1807.03748. If a batch repeats a document or a query, rows with the same one are not
    negatives of each other. The vectors are the head's output; without a head, the mean over the tokens, or the
    pooling that the initial checkpoint defines. Negatives come from the same batch only, so a step over several
    batches is not the same as a step over one large batch. Pairs of source and target are read the same way.
    """

    fields: ClassVar[tuple[str, ...]] = ("query", "document")
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    generates_text: ClassVar[bool] = False
    head_outputs: ClassVar[tuple[str, ...]] = ("vector", "states")
    is_default: ClassVar[bool] = True
    eval_outputs: ClassVar[str] = "rows"
    template: ClassVar[str] = "<s> $A </s>"
    num_special_tokens: ClassVar[int] = 2
    architecture_reason: ClassVar[str] = "no text is generated, so every token may attend to every other"
    file_kind: ClassVar[str | None] = "queries"
    default_data: ClassVar[Tree | None] = {"kind": "stdlib", "subset": "retrieval"}
    batches_per_epoch: ClassVar[int] = 10  # more negatives per batch

    temperature: float = field(0.05, "τ, temperature of the softmax", gt=0)
    symmetric: bool = field(False, "mean of this loss and that of finding each document's query")

    def fields_in(self, available: Sequence[str]) -> tuple[str, ...]:
        return ("source", "target") if "source" in available else self.fields

    def check_tokens(self, special_tokens: SpecialTokens, model: ModelSpec) -> None:
        if special_tokens.pool is None:
            return
        if model.head.output == "vector":
            raise IncompatibleError('the checkpoint\'s files define a pooling; use head = "none"', ("model", "head"))
        special_tokens.pool(torch.zeros(1, 1, 1), None)  # raises now if the pooling is not supported

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        columns = zip(*rows, strict=True)
        queries, documents = (
            pad_rows([special_tokens.add_special_tokens(text, self.template) for text in texts], special_tokens.pad)
            for texts in columns
        )
        return Batch(queries, torch.arange(len(rows)), source=documents, pool=special_tokens.pool)

    def loss(self, model: Model, batch: Batch) -> Loss:
        assert batch.source is not None
        queries, documents = (unit_vectors(model, texts, batch.pool) for texts in (batch.inputs, batch.source))
        logits = queries @ documents.T / self.temperature
        is_equal = equal_rows(batch.inputs.tokens) | equal_rows(batch.source.tokens)
        logits = logits.masked_fill(is_equal.fill_diagonal_(False), -torch.inf)
        total = F.cross_entropy(logits, batch.targets, reduction="sum")
        if self.symmetric:
            total = (total + F.cross_entropy(logits.T, batch.targets, reduction="sum")) / 2
        return Loss(total, len(batch.targets), int((logits.detach().argmax(dim=-1) == batch.targets).sum()))

    def supports(self, checkpoint: Checkpoint) -> bool:
        # any encoder gives vectors, as its mean output
        return super().supports(checkpoint) or checkpoint.spec.architecture in self.architectures

    def encode(
        self, checkpoint: Checkpoint, texts: Sequence[str], options: PredictOptions
    ) -> tuple[list[list[int]], dict[int, Tree]]:
        if checkpoint.tokenizer is None:
            raise UnsupportedError(
                "the checkpoint has no tokenizer; load(...).hidden_states(ids) gives the vectors of tokens"
            )
        return super().encode(checkpoint, texts, options)

    def results(
        self, checkpoint: Checkpoint, rows: Sequence[list[int]], options: PredictOptions
    ) -> Iterator[tuple[int, Tree]]:
        """Yields one vector per text."""
        for i, vector in checkpoint.outputs(rows, checkpoint.embed_inputs):
            yield i, {"vector": vector.tolist()}

    def format_line(self, result: Tree) -> str:
        return " ".join(f"{number:.6g}" for number in result["vector"])

    def format_result(self, result: Tree) -> list[str]:
        return [self.format_line(result)]

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Ranks each query's document among all by the cosine of their vectors, by BM25, and at chance level."""
        data = evaluation.data
        documents = data.corpus.documents(data.fields[1])
        index = {text: i for i, text in enumerate(documents)}
        queries, targets = [row[0] for row in data.rows], [index[row[1]] for row in data.rows]
        vectors, notes = embed_texts(evaluation, documents, "reading documents")
        query_vectors, _ = embed_texts(evaluation, queries, "reading queries")
        ranks = [
            rank_targets((query_vectors[i : i + 64] @ vectors.T).numpy(), targets[i : i + 64])
            for i in range(0, len(queries), 64)
        ]
        bm25 = BM25(documents)
        bm25_ranks = [
            rank_targets(bm25.scores(query)[None], [target]) for query, target in zip(queries, targets, strict=True)
        ]
        model_ranks = np.concatenate(ranks)
        outputs = tuple(
            {"query": row[0], "document": row[1], "rank": rank}
            for row, rank in zip(data.rows, model_ranks.tolist(), strict=True)
        )
        scores = {
            "model": metric.scores("ranking", model_ranks),
            "BM25": metric.scores("ranking", np.concatenate(bm25_ranks)),
            "chance": chance_level(len(documents)),
        }
        return EvalResult(scores, notes, outputs=outputs, extra={"documents": len(documents)})

    @classmethod
    def suggest_head(cls, suggestion: Suggestion) -> Lines:
        return [("head", {"kind": "vector", "pool": "mean"}, "the mean over the tokens of a text")]


def unit_vectors(model: Model, inputs: Inputs, pool: Pool | None) -> Tensor:
    """Returns one vector of length 1 per text, B×D."""
    return F.normalize(as_transformer(model, "an embedding").embed_sequences(inputs, pool).float(), dim=-1)


def equal_rows(tokens_BL: Tensor) -> Tensor:
    """Returns which rows are equal, B×B."""
    return (tokens_BL[:, None] == tokens_BL[None]).all(dim=-1)


def embed_texts(evaluation: Evaluation, texts: Sequence[str], action: str) -> tuple[Tensor, tuple[str, ...]]:
    rows, notes = evaluation.encode(texts)
    checkpoint, vectors = evaluation.checkpoint, torch.empty(0)
    for index in evaluation.batches([*map(len, rows)], action):
        batch_vectors = F.normalize(
            checkpoint.embed_inputs(checkpoint.pad([rows[i] for i in index])).float().cpu(), dim=-1
        )
        vectors = vectors if len(vectors) else torch.empty(len(texts), batch_vectors.shape[1])
        vectors[index] = batch_vectors
    return vectors, notes
