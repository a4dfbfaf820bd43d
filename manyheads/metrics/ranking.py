"""Metrics of the rank of each query's document among all documents: mean reciprocal rank and recall."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads.metrics.metric import register_metric

Ranks = NDArray[np.float64]


def rank_targets(scores_NM: ArrayLike, targets: ArrayLike) -> Ranks:
    """Returns the rank of each query's target among all M documents, from 1.

    Documents with equal scores share the mean of their ranks, so equal scores for all give the middle rank. NaN is
    below every number.
    """
    scores = np.nan_to_num(np.asarray(scores_NM), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    target_scores = scores[np.arange(len(scores)), np.asarray(targets, np.int64)][:, None]
    higher, equal = (scores > target_scores).sum(1), (scores == target_scores).sum(1)
    return 1 + higher + (equal - 1) / 2


@register_metric("mrr", "ranking")
def mrr(ranks: Ranks) -> float:
    """The mean of 1 / rank."""
    return float((1 / ranks).mean())


@register_metric("mrr@10", "ranking")
def mrr_at_10(ranks: Ranks) -> float:
    """The mean of 1 / rank, with 0 for ranks above 10."""
    return float(np.where(ranks <= 10, 1 / ranks, 0.0).mean())


@register_metric("recall@1", "ranking", percent=True)
def recall_at_1(ranks: Ranks) -> float:
    """The share of queries whose document is the first."""
    return float((ranks <= 1).mean())


@register_metric("recall@10", "ranking", percent=True)
def recall_at_10(ranks: Ranks) -> float:
    """The share of queries whose document is among the first ten."""
    return float((ranks <= 10).mean())


def chance_level(documents: int) -> dict[str, float]:
    """Returns the expected scores of a random order: (1 + ½ + … + 1/N) / N and k / N."""
    shares = 1 / np.arange(1, documents + 1) / documents
    return {
        "mrr": float(shares.sum()),
        "mrr@10": float(shares[:10].sum()),
        "recall@1": 1 / documents,
        "recall@10": min(1.0, 10 / documents),
    }
