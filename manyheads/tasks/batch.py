"""Batches and losses, which tasks make of rows: inputs with their targets, and sums with their counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.model.builder import Model
from manyheads.parts.head import Pool
from manyheads.parts.inputs import Inputs, pad_rows

EncodedRow = tuple[np.ndarray, ...]  # one array per field: ids, the index of a class, or patches, L×pixels
IGNORE_INDEX = -100  # target of a position that is not in the loss, as in torch


@dataclass(frozen=True)
class SpecialTokens:
    """The special token ids of a tokenizer, and how texts are wrapped in them."""

    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    mask: int = 4
    vocab_size: int = 5
    all_ids: tuple[int, ...] = (0, 1, 2, 3, 4)  # ids of all special tokens, and ids without a token
    decoder_start_token_id: int | None = None  # if it is not `bos`
    # the ids that a checkpoint's tokenizer adds before and after a text; None to use the task's template
    prefix_suffix_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    sentinels: tuple[int, ...] = ()  # the ids of `TaskSpec.additional_special_tokens`
    pool: Pool | None = None  # the pooling that a checkpoint's files define

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """All ids that are not special tokens."""
        return np.setdiff1d(np.arange(self.vocab_size), self.all_ids)

    def prefix_and_suffix(self, template: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and after a text, from the checkpoint's tokenizer or else from the template."""
        if self.prefix_suffix_ids is not None:
            return self.prefix_suffix_ids
        ids = {"<s>": self.bos, "</s>": self.eos}
        before, after = (tuple(ids[name] for name in part.split()) for part in template.split("$A"))
        return before, after

    def add_special_tokens(self, text: np.ndarray, template: str) -> np.ndarray:
        before, after = self.prefix_and_suffix(template)
        end = len(before) + len(text)
        ids = np.empty(end + len(after), dtype=np.int64)  # much faster than concatenating tuples, for every row
        ids[: len(before)], ids[len(before) : end], ids[end:] = before, text, after
        return ids if len(ids) else np.array([self.bos])

    def target_ids(self, text: np.ndarray, template: str) -> np.ndarray:
        """Returns the ids of a target, which are the text with its special tokens and always end in eos."""
        ids = self.add_special_tokens(text, template)
        return ids if ids[-1] == self.eos or self.prefix_suffix_ids is None else np.append(ids, self.eos)

    @property
    def decoder_prompt_ids(self) -> tuple[int, ...]:
        """The decoder's input ids before the first target token: its start token and the tokenizer's prefix."""
        start = self.bos if self.decoder_start_token_id is None else self.decoder_start_token_id
        return (start, *(self.prefix_suffix_ids[0] if self.prefix_suffix_ids else ()))


@dataclass(frozen=True)
class Batch:
    """Inputs, and a target class or token per position, IGNORE_INDEX where there is none.

    `source` is the input of an encoder: the source of a target, the document of a query, or the visible patches of
    an image.
    """

    inputs: Inputs
    targets: Tensor
    source: Inputs | None = None
    pool: Pool | None = None  # overrides the model's own pooling
    # for guided attention, N×3: row, query position, key position
    attention_targets: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        fields: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Inputs)
        }
        return replace(
            self, **fields, attention_targets={name: value.to(device) for name, value in self.attention_targets.items()}
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return self.inputs.num_tokens + (self.source.num_tokens if self.source else 0)


@dataclass(frozen=True)
class Loss:
    """A loss as a sum and a count, divided once at the end, so that accumulation and padding are exact.

    `correct` counts argmax hits, None where there is no argmax; `auxiliary_losses` are by name.
    """

    sum: Tensor
    count: int
    correct: int | None = 0
    auxiliary_losses: dict[str, Loss] = field(default_factory=dict)


@dataclass
class LossSum:
    """The losses of several batches together."""

    sum: float = 0.0
    count: int = 0
    correct: int | None = 0

    def add(self, loss: Loss) -> None:
        self.sum, self.count = self.sum + float(loss.sum), self.count + loss.count
        self.correct = None if self.correct is None or loss.correct is None else self.correct + loss.correct

    def metrics(self) -> dict[str, float]:
        loss, count = {"loss": self.sum / max(1, self.count)}, max(1, self.count)
        return loss if self.correct is None else loss | {"accuracy": self.correct / count}


def cross_entropy(logits_NV: Tensor, targets: Tensor, smoothing: float = 0.0) -> Loss:
    total = F.cross_entropy(logits_NV.float(), targets, reduction="sum", label_smoothing=smoothing)
    correct = int((logits_NV.detach().argmax(dim=-1) == targets).sum())
    return Loss(total, targets.numel(), correct)


def target_loss(model: Model, batch: Batch, smoothing: float = 0.0) -> Loss:
    """Returns the cross-entropy of a batch's targets, with label smoothing only in training."""
    mask = batch.targets != IGNORE_INDEX
    logits = model(batch.inputs, batch.source, logits_to_keep=mask)
    return cross_entropy(logits, batch.targets[mask], smoothing if model.training else 0.0)


def pad_targets(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    return pad_rows(rows, IGNORE_INDEX).tokens


def seq2seq_batch(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], special_tokens: SpecialTokens, template: str
) -> Batch:
    """Makes a batch of sources, and of targets shifted right behind the decoder's start token."""
    sources = [special_tokens.add_special_tokens(text, template) for text, _ in pairs]
    targets = [special_tokens.target_ids(text, template) for _, text in pairs]
    shifted = [np.concatenate((special_tokens.decoder_prompt_ids[:1], ids[:-1])) for ids in targets]
    return Batch(
        pad_rows(shifted, special_tokens.pad), pad_targets(targets), source=pad_rows(sources, special_tokens.pad)
    )


@dataclass(frozen=True)
class Chunk:
    """A text or a part of it; special tokens are added only at the ends of the text."""

    text: np.ndarray
    is_start: bool = True
    is_end: bool = True
