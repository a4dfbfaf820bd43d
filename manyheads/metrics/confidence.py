"""Metrics of right and wrong answers and their confidence: AUROC, risk and coverage, exact McNemar, intervals."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

Z = 1.959963984540054  # 97.5 % of a normal distribution are below, so that intervals have 95 %
Interval = tuple[float, float]


def auroc(correct: ArrayLike, confidence: ArrayLike) -> float:
    """P(a right answer is more confident than a wrong one), ties count half; NaN without answers of both kinds.

    The area under the receiver operating characteristic, which is the statistic of Mann and Whitney over n₁ n₂.
    """
    correct_N, confidence_N = np.asarray(correct, bool), np.asarray(confidence, np.float64)
    right, wrong = confidence_N[correct_N], np.sort(confidence_N[~correct_N])
    if not len(right) or not len(wrong):
        return math.nan
    below = (np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")) / 2
    return float(below.mean() / len(wrong))


def auroc_interval(correct: ArrayLike, confidence: ArrayLike) -> Interval:
    """The 95 % interval of `auroc` by Hanley and McNeil 1982, doi 10.1148/radiology.143.1.7063747, equations 1 and 2.

    Their variance is 0 for an area of 1. Here the area is at most 1 − 1 / (2 n₁ n₂), half a pair from the bound.
    """
    correct_N, area = np.asarray(correct, bool), auroc(correct, confidence)
    right, wrong = int(correct_N.sum()), int((~correct_N).sum())
    if math.isnan(area):
        return math.nan, math.nan
    margin = 0.5 / (right * wrong)
    a = min(max(area, margin), 1 - margin)
    both_right, both_wrong = a / (2 - a) - a * a, 2 * a * a / (1 + a) - a * a
    variance = (a * (1 - a) + (right - 1) * both_right + (wrong - 1) * both_wrong) / (right * wrong)
    half = Z * math.sqrt(variance)
    return max(0.0, area - half), min(1.0, area + half)


def risk_coverage(correct: ArrayLike, confidence: ArrayLike) -> list[tuple[float, float]]:
    """(coverage, risk) of every threshold: the share of the questions that is answered, and of errors among those.

    El-Yaniv and Wiener 2010, JMLR 11. Answers of equal confidence are given together.
    """
    confidence_N = np.asarray(confidence, np.float64)
    order = np.argsort(-confidence_N, kind="stable")
    sorted_N = confidence_N[order]
    errors = np.cumsum(~np.asarray(correct, bool)[order])
    ends = np.flatnonzero(np.append(sorted_N[1:] != sorted_N[:-1], True)[: len(order)]) + 1
    return [(int(end) / len(order), int(errors[end - 1]) / int(end)) for end in ends]


def mcnemar(first: ArrayLike, second: ArrayLike) -> float:
    """The exact two-sided p-value of McNemar 1947 that two systems, right or not on the same questions, are as good.

    Only questions that one of them alone has right count: b and c of them are binomial with p = ½.
    """
    first_N, second_N = np.asarray(first, bool), np.asarray(second, bool)
    b, c = int((first_N & ~second_N).sum()), int((~first_N & second_N).sum())
    tail: int = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def wilson_interval(count: int, total: int) -> Interval:
    """The 95 % interval of a share by Wilson 1927; (0, 1) of none."""
    if not total:
        return 0.0, 1.0
    share, extra = count / total, Z * Z / total
    centre, half = (share + extra / 2) / (1 + extra), math.sqrt(share * (1 - share) * extra + extra * extra / 4)
    return max(0.0, centre - half / (1 + extra)), min(1.0, centre + half / (1 + extra))
