"""What guessing gives: losses that a model must come below to have learned anything."""

from __future__ import annotations

import numpy as np
import torch

from manyheads.objective.score import NOTHING
from manyheads.train.stream import Order


def batches(ready, rows):
    order = Order(ready, rows, most=ready.run.train.evaluate_rows if rows is ready.unseen else 2000)
    return [order.batch(i) for i in range(len(order))]


def wanted(ready, rows):
    return torch.cat([batch.wanted[batch.wanted != NOTHING] for batch in batches(ready, rows)])


def unigram_entropy(ready):
    """Of unseen tokens, or classes, each guessed as often as it was wanted in training, once more for those never seen."""
    counts = 1 + torch.bincount(wanted(ready, ready.rows), minlength=len(ready.labels) or ready.tokens.count).double()
    return float(-(counts / counts.sum()).log()[wanted(ready, ready.unseen)].mean())


def mean_patch(ready):
    """The error of hidden patches, each guessed as the mean of all."""
    mean = torch.cat([batch.inputs.tokens for batch in batches(ready, ready.rows)]).mean(dim=(0, 1))
    errors = [((batch.inputs.tokens - mean)[batch.wanted != NOTHING]).square() for batch in batches(ready, ready.unseen)]
    return float(torch.cat(errors).mean())


def one_of_all(ready):
    """A document by chance, among those of rows that are scored together."""
    sizes = [len(batch.wanted) for batch in batches(ready, ready.unseen)]
    return float(np.average(np.log(sizes), weights=sizes))
