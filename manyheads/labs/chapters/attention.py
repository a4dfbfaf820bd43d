"""Attention as an operation: a distribution over keys, and the mean of their values."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from manyheads.labs.figures import Lines
from manyheads.labs.finding import Finding, at_most, is_true
from manyheads.labs.lab import lab
from manyheads.labs.plain import attend


def orthonormal(count: int, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q[:count]


@lab(
    "attention",
    rows=("A4",),
    seconds=(0.1, 0.1),
    opposite={"strength": 1.0},
    try_next=("--strength 5", "--keys 100"),
)
def copying(
    *,
    strength: Annotated[float, "length of the query"] = 20.0,
    keys: Annotated[int, "number of keys"] = 7,
    seed: int = 0,
) -> Finding:
    """A query along one key copies the value of that key.

    The keys are orthonormal, and the query is s times one of them. Its score with that key is s, and 0 with the others,
    so the softmax gives each of the others e⁻ˢ, relative to 1. The output is the value of that key, up to a distance of
    (n − 1) e⁻ˢ times the largest distance between two values.
    """
    k, v = orthonormal(keys, keys + 5), torch.randn(keys, 5, dtype=torch.float64)

    def error(s: float) -> float:
        return float((attend(s * k[:1], k, v)[0] - v[0]).norm())

    largest = float((v - v[0]).norm(dim=-1).max())
    strengths = [strength * i / 10 for i in range(1, 11)]
    errors, bounds = ([f(s) for s in strengths] for f in (error, lambda s: (keys - 1) * math.exp(-s) * largest))
    curves = {"measured": list(zip(strengths, errors, strict=True)), "bound": list(zip(strengths, bounds, strict=True))}
    title = "Distance between the output and the copied value"
    is_below = all(e <= b + 1e-12 for e, b in zip(errors, bounds, strict=True))
    return Finding(
        (
            at_most("distance to the value", errors[-1], 1e-6),
            is_true("below the bound at every strength", is_below),
            is_true("falls as the query grows", errors == sorted(errors, reverse=True)),
        ),
        (Lines(title, "length of the query", "distance", curves, log_y=True),),
    )
