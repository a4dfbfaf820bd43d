"""Metrics of predicted classes and their probabilities: accuracy, macro-F₁, calibration and the confusion matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads.metrics.metric import register_metric

BINS = 15


@register_metric("accuracy", "classes", percent=True)
def accuracy(targets: ArrayLike, probabilities_NC: ArrayLike) -> float:
    """The share of rows whose most probable class is the target."""
    return float((np.argmax(probabilities_NC, 1) == np.asarray(targets)).mean())


@register_metric("macro_f1", "classes")
def macro_f1(targets: ArrayLike, probabilities_NC: ArrayLike) -> float:
    """The mean over classes of 2 · correct / (targets + predictions), without classes that have neither."""
    targets_N, predicted_N = np.asarray(targets), np.argmax(probabilities_NC, 1)
    values = []
    for label in np.union1d(targets_N, predicted_N):
        is_target, is_predicted = targets_N == label, predicted_N == label
        values.append(2 * (is_target & is_predicted).sum() / (is_target.sum() + is_predicted.sum()))
    return float(np.mean(values))


@register_metric("calibration_error", "classes", higher_is_better=False)
def calibration_error(targets: ArrayLike, probabilities_NC: ArrayLike) -> float:
    """Σ_b |b| / n · |accuracy in b − confidence in b|, over bins of equal width ((i − 1) / 15, i / 15]

    The expected calibration error, Guo et al. 2017, arXiv 1706.04599; confidence is the predicted class's probability.
    """
    probabilities = np.asarray(probabilities_NC, np.float64)
    return expected_calibration_error(probabilities.argmax(1) == np.asarray(targets), probabilities.max(1))


def expected_calibration_error(correct: ArrayLike, confidence: ArrayLike) -> float:
    """As `calibration_error`, from whether each answer is right, and its confidence."""
    correct_N, confidence_N = np.asarray(correct, bool), np.asarray(confidence, np.float64)
    bins = np.clip(np.ceil(confidence_N * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=correct_N - confidence_N, minlength=BINS)  # |b| · (accuracy − confidence)
    return float(np.abs(gaps).sum() / len(confidence_N))


def confusion_matrix(targets: ArrayLike, predictions: ArrayLike, classes: int) -> NDArray[np.int64]:
    """Counts rows by target class (first axis) and predicted class (second axis), C×C."""
    cells = np.asarray(targets, np.int64) * classes + np.asarray(predictions, np.int64)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def class_scores(confusion_CC: NDArray[np.int64]) -> dict[str, list[float | None]]:
    """Precision, recall and F₁ of every class; None where it would be 0 / 0."""
    correct, targets, predictions = confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0)
    shares = {
        "precision": (correct, predictions),
        "recall": (correct, targets),
        "f1": (2 * correct, targets + predictions),
    }
    return {
        name: [
            int(numerator) / int(denominator) if denominator else None
            for numerator, denominator in zip(*counts, strict=True)
        ]
        for name, counts in shares.items()
    }
