"""Where the wanted document stands among all: mean reciprocal rank, recall."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.float64]


def ranks(scores_NM: Any, wanted: Any) -> Ranks:
    """For each query the place of its document among all M, from 1.

    Those with the very same score share the mean of their places: a model that finds all alike is not first, but in the middle. NaN is
    below all others.
    """
    scores, own = np.nan_to_num(np.asarray(scores_NM), nan=-np.inf, posinf=np.inf, neginf=-np.inf), np.asarray(wanted, np.int64)
    theirs = scores[np.arange(len(scores)), own][:, None]
    above, alike = (scores > theirs).sum(1), (scores == theirs).sum(1)
    return 1 + above + (alike - 1) / 2


def scores(found: Ranks) -> dict[str, float]:
    """MRR is the mean of 1 / rank, at 10 with 0 beyond the tenth place; recall@k the share among the first k."""
    return {
        "mrr": float((1 / found).mean()),
        "mrr@10": float(np.where(found <= 10, 1 / found, 0.0).mean()),
        "recall@1": float((found <= 1).mean()),
        "recall@10": float((found <= 10).mean()),
    }


def chance(count: int) -> dict[str, float]:
    """The same of an order drawn by chance: (1 + ½ + … + 1/N) / N, and k / N."""
    shares = 1 / np.arange(1, count + 1) / count
    return {"mrr": float(shares.sum()), "mrr@10": float(shares[:10].sum()), "recall@1": 1 / count, "recall@10": min(1.0, 10 / count)}
