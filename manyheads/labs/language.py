"""Small language models in memory, with any position scheme: text of one kind, causal or bidirectional."""

from __future__ import annotations

from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.builtin import BiographiesSpec
from manyheads.errors import UsageError
from manyheads.labs.fitting import fit, next_token_loss, small_model
from manyheads.labs.schemes import SCHEMES
from manyheads.model.builder import Model
from manyheads.spec import quote

Split = Literal["train", "validation"]
LENGTH = 24  # tokens of a row
NOTES, WRONG_NOTES = 12, 0.1
MASKED = 0.2  # share of the tokens that a bidirectional model has to find


class Tune:
    """A tune of 24 notes that repeats, from a random note on, in a random key, with a tenth of the notes wrong.

    It has each of the twelve notes twice. In a random key every note is as frequent at every position, the notes of a
    row as a set say nothing about which of them is where, and the row begins anywhere in the tune. So neither a note,
    nor its neighbours, nor the set of notes tells a position.
    """

    vocab = NOTES

    def windows(self, count: int, rng: torch.Generator, split: Split = "train") -> Tensor:
        melody = torch.cat([torch.randperm(NOTES, generator=torch.Generator().manual_seed(half)) for half in (0, 1)])
        starts, keys = (torch.randint(0, most, (count, 1), generator=rng) for most in (LENGTH, NOTES))
        notes = (melody[(starts + torch.arange(LENGTH)) % LENGTH] + keys) % NOTES
        is_wrong = torch.rand(notes.shape, generator=rng) < WRONG_NOTES
        return torch.where(is_wrong, torch.randint(0, NOTES, notes.shape, generator=rng), notes)


class Biographies:
    """The characters of texts about invented people, from a random position on."""

    def __init__(self) -> None:
        corpus = BiographiesSpec(people=200).load()
        rows = {"train": corpus.train, "validation": corpus.validation}
        texts = {split: " ".join(str(row[0]) for row in rows[split]) for split in rows}
        characters = sorted({character for text in texts.values() for character in text})
        index = {character: i for i, character in enumerate(characters)}
        self.ids = {split: torch.tensor([index[character] for character in text]) for split, text in texts.items()}
        self.vocab = len(characters)

    def windows(self, count: int, rng: torch.Generator, split: Split = "train") -> Tensor:
        ids = self.ids[split]
        starts = torch.randint(0, len(ids) - LENGTH, (count, 1), generator=rng)
        return ids[starts + torch.arange(LENGTH)]


@cache
def source(name: str) -> Tune | Biographies:
    if name not in ("tune", "biographies"):
        raise UsageError(f"no text {quote(name)}; expected tune or biographies")
    return Tune() if name == "tune" else Biographies()


@cache
def language_model(
    text: str, scheme: str, *, causal: bool = True, width: int = 32, steps: int = 200,
    rows: int = 48, window: int = 0, layers: int = 2, seed: int = 0,
) -> Model:  # fmt: skip
    """A model that predicts the next token, or, if it is not causal, the tokens that are masked."""
    data, rng = source(text), torch.Generator().manual_seed(seed)
    model = small_model(
        "decoder" if causal else "encoder", vocab=data.vocab + 1, head="tied", position=dict(SCHEMES[scheme]),
        layers=layers, width=width, attention={"heads": 4}, feedforward={"hidden": 4 * width},
        embed={"scale": True}, init="xavier",
        mask={"causal": causal, "window": window or None}, seed=seed,
    )  # fmt: skip
    loss = next_token_loss if causal else partial(masked_token_loss, mask_id=data.vocab, rng=rng)
    fit(model, lambda step: data.windows(rows, rng), loss, steps=steps, lr=6e-3)
    return model


def masked_token_loss(model: torch.nn.Module, ids: Tensor, mask_id: int, rng: torch.Generator) -> Tensor:
    is_masked = torch.rand(ids.shape, generator=rng) < MASKED
    is_masked[0, 0] = True  # at least one
    return F.cross_entropy(model(ids.masked_fill(is_masked, mask_id))[is_masked], ids[is_masked])


@torch.no_grad()
def perplexity(model: Model, text: str) -> float:
    """exp of the mean loss on validation windows, which are the same for every model."""
    ids = source(text).windows(256, torch.Generator().manual_seed(0), "validation")
    return float(next_token_loss(model, ids).exp())
