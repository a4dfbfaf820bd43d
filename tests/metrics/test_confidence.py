"""Metrics of confidence against scikit-learn and scipy, and the laws that they keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.metrics.classes import calibration_error, expected_calibration_error
from manyheads.metrics.confidence import auroc, auroc_interval, mcnemar, risk_coverage, wilson_interval

ANSWERS = st.lists(st.tuples(st.booleans(), st.integers(0, 20).map(lambda i: i / 20)), min_size=2, max_size=60)


@given(ANSWERS)
def test_auroc_is_that_of_scikit_learn(answers):
    sklearn = pytest.importorskip("sklearn.metrics")
    correct, confidence = zip(*answers, strict=True)
    if len(set(correct)) < 2:
        assert math.isnan(auroc(correct, confidence))
        assert all(map(math.isnan, auroc_interval(correct, confidence)))
        return
    area = auroc(correct, confidence)
    assert area == pytest.approx(sklearn.roc_auc_score(correct, confidence))
    low, high = auroc_interval(correct, confidence)
    assert 0 <= low <= area <= high <= 1
    assert auroc(correct, -np.array(confidence)) == pytest.approx(1 - area)


def test_the_interval_of_auroc_covers_the_true_area_in_most_samples():
    """Two normal distributions one standard deviation apart have an area of Φ(1/√2)."""
    rng, true = np.random.default_rng(0), 0.5 * (1 + math.erf(0.5))
    correct, covered = np.arange(120) < 50, 0
    for _ in range(400):
        low, high = auroc_interval(correct, rng.normal(size=120) + correct)
        covered += low <= true <= high
    assert 0.91 <= covered / 400 <= 0.985


@given(ANSWERS)
def test_risk_and_coverage_are_those_of_every_threshold(answers):
    correct, confidence = map(np.array, zip(*answers, strict=True))
    expected = [
        ((confidence >= threshold).mean(), 1 - correct[confidence >= threshold].mean())
        for threshold in sorted(set(confidence.tolist()), reverse=True)
    ]
    assert np.allclose(risk_coverage(correct, confidence), expected)


def test_no_answers_have_no_risk():
    assert risk_coverage([], []) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200))
def test_mcnemar_is_a_binomial_test_of_the_questions_that_one_alone_has_right(rows):
    stats = pytest.importorskip("scipy.stats")
    first, second = [a for a, _ in rows], [b for _, b in rows]
    wins, losses = sum(a and not b for a, b in rows), sum(b and not a for a, b in rows)
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert mcnemar(first, second) == pytest.approx(expected)
    assert mcnemar(first, second) == mcnemar(second, first)


@given(st.integers(0, 80), st.integers(0, 80))
def test_the_interval_of_a_share_is_that_of_wilson(right, wrong):
    stats = pytest.importorskip("scipy.stats")
    if right + wrong:
        expected = stats.binomtest(right, right + wrong).proportion_ci(method="wilson")
        assert wilson_interval(right, right + wrong) == pytest.approx((expected.low, expected.high), abs=1e-12)
    else:
        assert wilson_interval(0, 0) == (0, 1)


@given(ANSWERS)
def test_the_calibration_error_of_two_classes_is_that_of_their_answers(answers):
    """With two classes the predicted one has a probability of at least ½."""
    correct, half = map(np.array, zip(*answers, strict=True))
    confidence = 0.51 + 0.49 * half
    probabilities = np.stack((confidence, 1 - confidence), axis=1)
    assert calibration_error(~correct, probabilities) == pytest.approx(expected_calibration_error(correct, confidence))
