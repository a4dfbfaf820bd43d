"""The inputs of a model (a batch with its padding, positions and packed documents) and the output of an encoder."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import InputError, InputLengthError, InputShapeError

INTEGERS = (torch.int64, torch.int32)
BATCH_TOKENS = 2048  # tokens per batch, padding included, with one row per beam


@dataclass(frozen=True)
class Inputs:
    """A batch of sequences, of which only `tokens` is required.

    tokens: token ids, B×L, or image patches, B×L×pixels.
    padding_mask: B×L, True at padding, which may be on either side.
    positions: B×L or 1×L, the position of each token. By default, the number of non-padding tokens before it.
    document_ids: B×L, the document of each token in a packed row. Documents do not attend to each other.
    token_type_ids, task_type_ids: B×L, for an embedding that has token types or task types. 0 by default.
    prefix_lengths: B, the number of first tokens that every token may attend to, for a mask with a prefix.
    final_length: the length of the sequences after generation, for rotary embeddings that depend on it.
    """

    tokens: Tensor
    padding_mask: Tensor | None = None
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    task_type_ids: Tensor | None = None
    prefix_lengths: Tensor | None = None
    final_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor):
            raise InputShapeError(f"tokens is a {type(self.tokens).__name__}, expected a tensor of batch × length")
        if self.tokens.dim() < 2:
            raise InputShapeError(f"tokens has shape {tuple(self.tokens.shape)}, expected batch × length")
        batch, length = self.tokens.shape[:2]
        if not batch or not length:
            raise InputLengthError(f"tokens has shape {tuple(self.tokens.shape)}, expected at least one token")
        for name in ("padding_mask", "positions", "document_ids", "token_type_ids", "task_type_ids", "prefix_lengths"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.dtype not in (
                (torch.bool,) if name == "padding_mask" else INTEGERS
            ):
                actual = value.dtype if isinstance(value, Tensor) else type(value).__name__
                expected = (
                    "torch.bool, True at padded positions" if name == "padding_mask" else "a tensor of torch.int64"
                )
                raise InputShapeError(f"{name} is {actual}, expected {expected}")
            allowed = [(batch,)] if name == "prefix_lengths" else [(batch, length)]
            if tuple(value.shape) not in allowed + [(1, length)] * (name == "positions"):
                raise InputShapeError(f"{name} has shape {tuple(value.shape)}, expected {allowed[0]}")
        if self.final_length is not None and (type(self.final_length) is not int or self.final_length < length):
            raise InputLengthError(
                f"final_length is {self.final_length}, expected an integer of at least the length {length}"
            )

    @staticmethod
    def of(inputs: Inputs | Tensor) -> Inputs:
        """Converts a tensor of tokens to Inputs without padding; Inputs are returned unchanged."""
        return inputs if isinstance(inputs, Inputs) else Inputs(inputs)

    def to(self, device: torch.device | str) -> Inputs:
        """Moves the batch to a device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return self.batch_size * self.length if self.padding_mask is None else int((~self.padding_mask).sum())


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], pad: int = 0, *, left: bool = False) -> Inputs:
    """Pads rows of ids to one batch, on the right or on the left."""
    length = max(map(len, rows), default=0)
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    padding_mask = np.ones((len(rows), length), dtype=bool)
    for i, row in enumerate(rows):
        span = slice(length - len(row), length) if left else slice(len(row))
        ids[i, span], padding_mask[i, span] = row, False
    return Inputs(torch.from_numpy(ids), padding_mask=torch.from_numpy(padding_mask) if padding_mask.any() else None)


def check_token_ids(ids: Sequence[int], vocab: int, index: int = 0) -> None:
    """Raises if an id of row `index` is outside the vocabulary."""
    if invalid := [token for token in ids if not 0 <= token < vocab]:
        raise InputError(f"token {invalid[0]} is outside the {vocab:,} tokens of the model (0 to {vocab - 1})", index)


def group_by_length(
    lengths: Sequence[int], max_tokens: int = BATCH_TOKENS, *, keys: Sequence[Hashable] | None = None
) -> Iterator[list[int]]:
    """Yields the row indices of each batch of at most `max_tokens` with padding, the longest rows first.

    Rows of different keys share no batch.
    """
    groups: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        groups.setdefault(keys[i] if keys else None, []).append(i)
    for order in groups.values():
        start = 0
        while start < len(order):
            end = start + max(1, max_tokens // max(1, lengths[order[start]]))
            yield order[start:end]
            start = end


@dataclass(frozen=True)
class Memory:
    """The output of an encoder, which a decoder attends to."""

    states: Tensor  # B×M×D
    positions: Tensor | None = None  # B×M; None means 0, 1, 2, …
    padding_mask: Tensor | None = None  # B×M
    document_ids: Tensor | None = None  # B×M
    # True if the caller passed no positions, so every position is < length
    default_positions: bool = True

    def key_positions(self) -> Tensor:
        """The positions, (B or 1)×M."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.states.shape[1], device=self.states.device)[None]


def has_no_data(tensor: Tensor) -> bool:
    """Whether values cannot be read because the tensor is on the meta device or a graph is being exported."""
    return tensor.device.type == "meta" or torch.compiler.is_exporting()


def check_not_packed(inputs: Inputs) -> None:
    """Raises an error for packed documents, which only an attention mask can separate."""
    if inputs.document_ids is not None or inputs.prefix_lengths is not None:
        raise InputError(
            "document_ids and prefix_lengths need attention, which this network does not have; give one text per row"
        )


def next_position(positions_BL: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The position after the last non-padding token, B×1; 0 in a row of padding."""
    if padding_mask is None:
        return positions_BL[:, -1:] + 1
    last = (~padding_mask).flip(1).to(torch.int8).argmax(dim=1, keepdim=True)
    position = positions_BL.flip(1).gather(1, last) + 1
    return position.masked_fill(padding_mask.all(dim=1, keepdim=True), 0)


def input_positions(inputs: Inputs, start: Tensor | int = 0) -> Tensor:
    """The given positions, or `start` plus the number of non-padding tokens before each, (B or 1)×L."""
    if inputs.positions is not None:
        if inputs.padding_mask is None:
            return inputs.positions
        # the output must not depend on the positions of padding
        return inputs.positions.expand(inputs.batch_size, -1).masked_fill(inputs.padding_mask, 0)
    if inputs.padding_mask is not None:
        return ((~inputs.padding_mask).cumsum(dim=-1) - 1).clamp(min=0) + start
    return torch.arange(inputs.length, device=inputs.tokens.device)[None] + start


def tokens_first(padding_mask: Tensor) -> Tensor:
    """Indices, B×L, that move the non-padding tokens of each row to its start and keep their order."""
    index = torch.arange(padding_mask.shape[1], device=padding_mask.device)
    return torch.where(padding_mask, index + padding_mask.shape[1], index).argsort(dim=1)
