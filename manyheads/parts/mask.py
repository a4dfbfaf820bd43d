"""Masks as data: who may see whom, lowered once a forward to the kernel's causal flag, a dense mask or blocks of rows.

A mask is always added before the softmax. A query that may see nothing gets zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from manyheads.spec import Spec, SpecError, field

DENSE_LIMIT = 1 << 24  # cells; a larger mask is never made whole


class MaskSpec(Spec):
    """Which keys a query may see by their order. Padding and segments come with the batch and always count."""

    causal: bool = field(False, "no key after the query")
    window: int | None = field(None, "only keys nearer than this, the query's own place included", ge=1)
    prefix: bool = field(False, "the first keys, as many as the batch says, are seen by all")

    @model_validator(mode="after")
    def _prefix_of_something(self) -> Self:
        if self.prefix and not self.causal and self.window is None:
            raise SpecError("opens a mask that hides nothing; give causal = true or a window with it", ("prefix",))
        return self


@dataclass(frozen=True)
class Mask:
    """May query i see key j? Queries and keys are counted from where they begin in the whole text."""

    queries: int
    keys: int
    device: torch.device
    offset: int = 0  # where the first query stands
    first: int = 0  # where the first key stands
    causal: bool = False
    window: int | None = None
    prefix_B: Tensor | None = None
    padding_BM: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None  # of the queries B×L, of the keys B×M
    ranks: tuple[Tensor, Tensor] | None = None  # the same, counting real tokens only: a window and a prefix skip padding

    @cached_property
    def form(self) -> Literal["open", "causal", "dense", "blocks"]:
        """The cheapest form that says the same: nothing, the kernel's own flag, a boolean tensor, or rows in blocks."""
        last, end = self.first + self.keys - 1, self.offset + self.queries - 1
        behind, ahead = end - self.first, 0 if self.causal else last - self.offset  # how far a query is from a key, at most
        windowed = self.window is not None and max(behind, ahead) >= self.window
        by_order = (self.causal and self.offset < last) or windowed
        others = self.prefix_B is not None or self.padding_BM is not None or self.segments is not None
        if not by_order and not others:
            return "open"
        if not others and not windowed and self.queries == self.keys and self.offset == self.first:
            return "causal"
        by_row = by_order or self.prefix_B is not None or self.segments is not None
        banded = self._reach is not None and 4 * self._reach < self.keys
        return "blocks" if banded or (by_row and self.batch * self.queries * self.keys > DENSE_LIMIT) else "dense"

    @property
    def batch(self) -> int:
        tensors = (self.padding_BM, self.prefix_B, self.segments and self.segments[0])
        return max((len(tensor) for tensor in tensors if tensor is not None), default=1)

    @property
    def _reach(self) -> int | None:
        """How far a query sees by index; unknown where padding stands in between or a prefix is always seen."""
        return self.window if self.ranks is None and self.prefix_B is None else None

    @cached_property
    def dense(self) -> Tensor | None:
        """True where the query may see the key: (B or 1)×1×(L or 1)×M; None where everybody sees everything."""
        seen: Tensor | None = None
        if self.causal or self.window is not None:
            seen = self._by_order()
        if self.prefix_B is not None and seen is not None:
            seen = seen | (self._ranks()[1] < self.prefix_B[:, None])[:, None]
        if self.segments is not None:
            of_queries, of_keys = self.segments
            same = of_queries[:, :, None] == of_keys[:, None, :]
            seen = same if seen is None else seen & same
        if self.padding_BM is not None:
            real = ~self.padding_BM[:, None, :]
            seen = real if seen is None else seen & real
        return None if seen is None else seen[:, None]

    def _indices(self) -> tuple[Tensor, Tensor]:
        query = torch.arange(self.offset, self.offset + self.queries, device=self.device)[None]
        return query, torch.arange(self.first, self.first + self.keys, device=self.device)[None]

    def _ranks(self) -> tuple[Tensor, Tensor]:
        return self._indices() if self.ranks is None else self.ranks

    def _by_order(self) -> Tensor:
        query, key = self._indices()
        behind = query[:, :, None] - key[:, None, :]
        seen = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window is None:
            return seen
        query, key = self._ranks()
        return seen & ((query[:, :, None] - key[:, None, :]).abs() < self.window)

    def cut(self, rows: slice, columns: slice) -> Mask:
        """The same mask for some of the queries and some of the keys."""

        def both(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if pair is None else (pair[0][:, rows], pair[1][:, columns])

        start, stop, _ = rows.indices(self.queries)
        first, last, _ = columns.indices(self.keys)
        return replace(
            self,
            queries=stop - start,
            keys=last - first,
            offset=self.offset + start,
            first=self.first + first,
            padding_BM=None if self.padding_BM is None else self.padding_BM[:, columns],
            segments=both(self.segments),
            ranks=both(self.ranks),
        )

    @cached_property
    def _blocks(self) -> dict[int | None, list[tuple[slice, slice, Mask]]]:
        return {}

    def blocks(self, most: int | None = None) -> list[tuple[slice, slice, Mask]]:
        """Rows in blocks, each with the keys it can reach and its mask: a window costs its width a query, not the whole length.

        Made once for all layers that share this mask.
        """
        if most not in self._blocks:
            size = max(1, DENSE_LIMIT // (4 * self.batch * self.keys)) if self._reach is None else max(64, self._reach)
            spans = list(self._spans(min(size, most or size)))
            self._blocks[most] = [(rows, columns, self.cut(rows, columns)) for rows, columns in spans]
        return self._blocks[most]

    def _spans(self, size: int) -> Iterator[tuple[slice, slice]]:
        for start in range(0, self.queries, size):
            stop = min(start + size, self.queries)
            first, last = 0, self.keys
            if self.causal and self.prefix_B is None:
                last = min(last, self.offset - self.first + stop)
            if self._reach is not None:
                first = max(0, self.offset - self.first + start - self._reach + 1)
                last = min(last, self.offset - self.first + stop + self._reach - 1)
            yield slice(start, stop), slice(first, last)
