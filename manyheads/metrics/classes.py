"""Classes that were chosen, and how sure of them the model was: accuracy, macro-F₁, calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float64]  # a probability for every row and class
Chosen = NDArray[np.int64]
BINS = 15


def scores(wanted: Any, probabilities: Any) -> dict[str, float]:
    """Of the number of the right class for each row, and the probability of every class."""
    right, shares = np.asarray(wanted, np.int64), np.asarray(probabilities, np.float64)
    chosen = shares.argmax(1)
    return {
        "accuracy": float((chosen == right).mean()),
        "macro_f1": macro_f1(right, chosen),
        "calibration_error": calibration_error(right, shares),
    }


def macro_f1(wanted: Chosen, chosen: Chosen) -> float:
    """The mean over classes of 2·both / (wanted + chosen); over those that were wanted or chosen at all."""
    found = []
    for one in np.union1d(wanted, chosen):
        both = ((wanted == one) & (chosen == one)).sum()
        found.append(2 * both / ((wanted == one).sum() + (chosen == one).sum()))
    return float(np.mean(found))


def calibration_error(wanted: Chosen, probabilities: Shares, bins: int = BINS) -> float:
    """Σ_b |b| / n · |accuracy in b − confidence in b|, over bins of equal width ((i − 1) / 15, i / 15]

    Guo et al. 2017, arXiv 1706.04599: the expected calibration error. Confidence is the probability of what was chosen.
    """
    sure, right = probabilities.max(1), probabilities.argmax(1) == wanted
    bin_of = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=right - sure, minlength=bins)  # |b| · (accuracy − confidence)
    return float(np.abs(gaps).sum() / len(sure))
