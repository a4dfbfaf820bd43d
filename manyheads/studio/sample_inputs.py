"""Inputs to try on the page: rows of the validation set of a run on built-in data, else sentences, ids or a ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.source import FileSpec
from manyheads.errors import ManyheadsError
from manyheads.studio import forward
from manyheads.studio.session import ShownCheckpoint
from manyheads.training.evaluator import find_run

COUNT = 4  # rows of a validation set
SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "When Mary and John went to the store, John gave a drink to Mary.",
    "the keys to the cabinet are on the table , and the keys to the car are too",
)
IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)


def find_examples(shown: ShownCheckpoint) -> tuple[str, ...]:
    """Texts for the input of the page; pixels and ids are written as numbers."""
    checkpoint = shown.checkpoint
    if rows := validation_rows(shown.path):
        return rows
    if forward.reads_images(checkpoint):
        return (as_text(ring(checkpoint)),)
    if checkpoint.tokenizer is None:
        vocab = checkpoint.spec.source_vocab or checkpoint.spec.vocab
        assert isinstance(vocab, int)
        return (" ".join(str(token % vocab) for token in IDS),)
    return SENTENCES


def validation_rows(path: str) -> tuple[str, ...]:
    """Some inputs of a run; files of a user may be large, and are not opened for this."""
    try:
        run = find_run(Path(path), None, ())
        if run is None or isinstance(run.data, FileSpec):
            return ()
        rows = run.data.load().validation
    except ManyheadsError:  # the page can be shown without
        return ()
    return tuple(as_text(rows[i][0]) for i in range(0, len(rows), max(1, len(rows) // COUNT)))[:COUNT]


def as_text(value: Any) -> str:
    """An input as the page reads it."""
    if isinstance(value, str):
        return value
    return " ".join(f"{number:.3g}" for number in torch.as_tensor(value).flatten().tolist())


def ring(checkpoint: Checkpoint) -> Tensor:
    """A picture of a ring, channels × height × width."""
    embed: Any = forward.input_embed(checkpoint)
    patches = (checkpoint.max_positions or 16) - bool(embed.class_token)
    axis = torch.linspace(-1, 1, int(patches**0.5) * embed.side)
    distance = (axis[:, None].square() + axis.square()).sqrt()
    return (1 - (distance - 0.6).abs() * 4).clamp(0, 1).repeat(embed.channels, 1, 1)
