"""Losses of trivial predictions, which a trained model must be below, and the mean of a loss."""

from __future__ import annotations

import numpy as np
import torch

from manyheads.tasks.batch import IGNORE_INDEX
from manyheads.training.batches import BatchLoader


def mean_of(loss):
    return float(loss.sum.detach()) / loss.count


def batches(run, rows):
    loader = BatchLoader(run, rows, max_rows=run.spec.train.eval_rows if rows is run.validation_dataset else 2000)
    return [*loader]


def targets(run, rows):
    return torch.cat([batch.targets[batch.targets != IGNORE_INDEX] for batch in batches(run, rows)])


def unigram_entropy(run):
    """The loss on validation tokens, or classes, predicted with their frequency in training (add-one smoothing)."""
    size = len(run.labels) or run.special_tokens.vocab_size
    counts = 1 + torch.bincount(targets(run, run.train_dataset), minlength=size).double()
    return float(-(counts / counts.sum()).log()[targets(run, run.validation_dataset)].mean())


def mean_patch(run):
    """The error of masked patches, each predicted as the mean of all training patches."""
    mean = torch.cat([batch.inputs.tokens for batch in batches(run, run.train_dataset)]).mean(dim=(0, 1))
    validation = batches(run, run.validation_dataset)
    errors = [((batch.inputs.tokens - mean)[batch.targets != IGNORE_INDEX]).square() for batch in validation]
    return float(torch.cat(errors).mean())


def random_document(run):
    """The loss of a document chosen at random among those of a batch."""
    sizes = [len(batch.targets) for batch in batches(run, run.validation_dataset)]
    return float(np.average(np.log(sizes), weights=sizes))
