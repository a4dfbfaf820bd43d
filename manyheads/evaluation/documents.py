"""Where a model finds the document of a query, beside BM25."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manyheads.evaluation.subject import Found, Subject, as_ids, in_batches
from manyheads.metrics import ranking
from manyheads.metrics.baselines import BM25


def found_documents(subject: Subject) -> Found:
    """The place of each query's document among all there are, by the cosine of their vectors, by BM25, and by chance."""
    documents = subject.corpus.documents(subject.fields[1])
    place = {text: i for i, text in enumerate(documents)}
    queries, wanted = [row[0] for row in subject.rows], [place[row[1]] for row in subject.rows]
    vectors, note = embedded(subject, documents, "reading documents")
    asked_for, _ = embedded(subject, queries, "reading queries")
    ours = [ranking.ranks((asked_for[i : i + 64] @ vectors.T).numpy(), wanted[i : i + 64]) for i in range(0, len(queries), 64)]
    words = BM25(documents)
    theirs = [ranking.ranks(words.scores(query)[None], [own]) for query, own in zip(queries, wanted, strict=True)]
    scores = {"model": ranking.scores(np.concatenate(ours)), "BM25": ranking.scores(np.concatenate(theirs))}
    return Found(scores | {"chance": ranking.chance(len(documents))}, note, more={"documents": len(documents)})


def embedded(subject: Subject, texts: Sequence[str], what: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    rows, note = as_ids(subject, texts)
    vectors: torch.Tensor | None = None
    for places in in_batches(subject, [*map(len, rows)], what):
        found = subject.loaded.pooled(subject.loaded.padded([rows[i] for i in places])).float().cpu()
        found = torch.nn.functional.normalize(found, dim=-1)
        vectors = torch.empty(len(texts), found.shape[1]) if vectors is None else vectors
        vectors[places] = found
    assert vectors is not None
    return vectors, note
