"""Attention masks, described as data and computed as the kernel's causal flag, a dense mask, or blocks of rows.

A mask is always applied before the softmax. A query without visible keys gets an output of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from manyheads.errors import IncompatibleError
from manyheads.spec import Spec, field

DENSE_LIMIT = 1 << 24  # largest number of elements of a dense mask


class MaskSpec(Spec):
    """Which keys a query may attend to, by their order. Padding and packed documents are masked by the batch."""

    causal: bool = field(False, "whether keys after the query are masked")
    window: int | None = field(
        None, "w, the size of a sliding window: query i attends to keys j with |i − j| < w", ge=1
    )
    prefix: bool = field(False, "whether every query may attend to the first `prefix_lengths` keys of its row")

    @model_validator(mode="after")
    def _prefix_needs_mask(self) -> Self:
        if self.prefix and not self.causal and self.window is None:
            raise IncompatibleError("a prefix has no effect without causal = true or a window", ("prefix",))
        return self


@dataclass(frozen=True)
class Mask:
    """Whether query i may attend to key j, for a part of the queries and keys of a sequence."""

    num_queries: int
    num_keys: int
    device: torch.device
    query_offset: int = 0  # index of the first query in the sequence
    key_offset: int = 0  # index of the first key in the sequence
    causal: bool = False
    window: int | None = None
    prefix_B: Tensor | None = None
    padding_BM: Tensor | None = None
    document_ids: tuple[Tensor, Tensor] | None = None  # document ids of the queries, B×L, and of the keys, B×M
    # (query, key) indices counted without padding; used by window and prefix
    non_padding_indices: tuple[Tensor, Tensor] | None = None
    dense_limit: int = DENSE_LIMIT  # a mask with more elements is computed in blocks

    @cached_property
    def form(self) -> Literal["none", "causal", "dense", "blocks"]:
        """The cheapest equivalent form: no mask, the kernel's causal flag, a boolean tensor, or blocks of rows."""
        last_key, last_query = self.key_offset + self.num_keys - 1, self.query_offset + self.num_queries - 1
        ahead = 0 if self.causal else last_key - self.query_offset  # the farthest key after a query
        is_windowed = self.window is not None and max(last_query - self.key_offset, ahead) >= self.window
        by_order = (self.causal and self.query_offset < last_key) or is_windowed
        by_batch = self.prefix_B is not None or self.padding_BM is not None or self.document_ids is not None
        if not by_order and not by_batch:
            return "none"
        square = self.num_queries == self.num_keys and self.query_offset == self.key_offset
        if square and not by_batch and not is_windowed:
            return "causal"
        by_row = by_order or self.prefix_B is not None or self.document_ids is not None
        is_banded = self._reach is not None and 4 * self._reach < self.num_keys
        too_large = self.batch_size * self.num_queries * self.num_keys > self.dense_limit
        return "blocks" if is_banded or (by_row and too_large) else "dense"

    @property
    def batch_size(self) -> int:
        tensors = (self.padding_BM, self.prefix_B, self.document_ids and self.document_ids[0])
        return max((len(tensor) for tensor in tensors if tensor is not None), default=1)

    @property
    def _reach(self) -> int | None:
        """The window in indices; None without a window, or if padding or a prefix allow larger distances."""
        return self.window if self.non_padding_indices is None and self.prefix_B is None else None

    @cached_property
    def dense(self) -> Tensor | None:
        """Boolean mask, True where the query may attend to the key, (B or 1)×1×(L or 1)×M; None for no mask."""
        visible: Tensor | None = None
        if self.causal or self.window is not None:
            visible = self._by_order()
        if self.prefix_B is not None and visible is not None:
            visible = visible | (self._non_padding_indices()[1] < self.prefix_B[:, None])[:, None]
        if self.document_ids is not None:
            query_ids, key_ids = self.document_ids
            same = query_ids[:, :, None] == key_ids[:, None, :]
            visible = same if visible is None else visible & same
        if self.padding_BM is not None:
            non_padding = ~self.padding_BM[:, None, :]
            visible = non_padding if visible is None else visible & non_padding
        return None if visible is None else visible[:, None]

    def _indices(self) -> tuple[Tensor, Tensor]:
        query = torch.arange(self.query_offset, self.query_offset + self.num_queries, device=self.device)[None]
        return query, torch.arange(self.key_offset, self.key_offset + self.num_keys, device=self.device)[None]

    def _non_padding_indices(self) -> tuple[Tensor, Tensor]:
        return self._indices() if self.non_padding_indices is None else self.non_padding_indices

    def _by_order(self) -> Tensor:
        query, key = self._indices()
        behind = query[:, :, None] - key[:, None, :]
        visible = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window is None:
            return visible
        query, key = self._non_padding_indices()
        return visible & ((query[:, :, None] - key[:, None, :]).abs() < self.window)

    def submask(self, rows: slice, columns: slice) -> Mask:
        """The same mask for some of the queries and some of the keys."""

        def part(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if pair is None else (pair[0][:, rows], pair[1][:, columns])

        first_row, end_row, _ = rows.indices(self.num_queries)
        first_column, end_column, _ = columns.indices(self.num_keys)
        return replace(
            self,
            num_queries=end_row - first_row,
            num_keys=end_column - first_column,
            query_offset=self.query_offset + first_row,
            key_offset=self.key_offset + first_column,
            padding_BM=None if self.padding_BM is None else self.padding_BM[:, columns],
            document_ids=part(self.document_ids),
            non_padding_indices=part(self.non_padding_indices),
        )

    @cached_property
    def _blocks(self) -> dict[int | None, list[tuple[slice, slice, Mask]]]:
        return {}

    def blocks(self, max_rows: int | None = None) -> list[tuple[slice, slice, Mask]]:
        """Blocks of rows, each with the columns it can attend to and its mask. A window then costs its width per query.

        The blocks are computed once for all layers that share this mask.
        """
        if max_rows not in self._blocks:
            by_memory = max(1, self.dense_limit // (4 * self.batch_size * self.num_keys))
            size = by_memory if self._reach is None else max(64, self._reach)
            spans = list(self._spans(min(size, max_rows or size)))
            self._blocks[max_rows] = [(rows, columns, self.submask(rows, columns)) for rows, columns in spans]
        return self._blocks[max_rows]

    def _spans(self, size: int) -> Iterator[tuple[slice, slice]]:
        shift = self.query_offset - self.key_offset
        for start in range(0, self.num_queries, size):
            stop = min(start + size, self.num_queries)
            first, end = 0, self.num_keys
            if self.causal and self.prefix_B is None:
                end = min(end, shift + stop)
            if self._reach is not None:
                first = max(0, shift + start - self._reach + 1)
                end = min(end, shift + stop + self._reach - 1)
            yield slice(start, stop), slice(first, end)
