"""A running mean of the weights: kept in the optimiser's memory, and so in every checkpoint; what is looked at and saved is the mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BESIDE = "beside"  # in the optimiser's memory of a weight: the mean while the model learns, the weight while it is looked at


@torch.no_grad()
def follow(changer: torch.optim.Optimizer, memory: float, step: int) -> None:
    """m ← βm + (1 − β)w, with β = min(memory, 1 − 1/step): at first the mean of all, so that the first weights are soon forgotten."""
    for group in changer.param_groups:
        for weight in group["params"]:
            if held := changer.state.get(weight):
                held.setdefault(BESIDE, weight.detach().clone()).lerp_(weight, 1 - min(memory, 1 - 1 / step))


@contextmanager
def averaged(changer: torch.optim.Optimizer) -> Iterator[None]:
    """The model with the means for its weights, where there are any."""
    swap(changer)
    try:
        yield
    finally:
        swap(changer)


def swap(changer: torch.optim.Optimizer) -> None:
    """Weights and means change places."""
    for group in changer.param_groups:
        for weight in group["params"]:
            held = changer.state.get(weight, {})
            if BESIDE in held:
                held[BESIDE], weight.data = weight.data, held[BESIDE]


def taken_up(changer: torch.optim.Optimizer, memory: float) -> None:
    """A checkpoint has the means where the model has its weights. A run that keeps none any more forgets those that it held.

    Nobody would follow the weights, and every later checkpoint would hold the means of long ago.
    """
    swap(changer)
    for held in changer.state.values() if not memory else ():
        held.pop(BESIDE, None)
