"""What decoding carries from step to step: one protocol for caches, cross-attention and recurrent states.

`start` makes a state, `step` reads tokens and returns the logits and the next state, `select` keeps or repeats rows.
A state is passed and returned, never kept on a module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from manyheads.parts.attention import KeyValue
from manyheads.parts.embed import Inputs


class State(Protocol):
    """What a step returns for the next; `rows` may drop, reorder and repeat."""

    def select(self, rows: Tensor) -> Self: ...


class Decodes(Protocol):
    """A model that writes token by token."""

    def start(self, source: Inputs | None = None, *, batch: int = 1, capacity: int | None = None) -> Any: ...

    def step(self, inputs: Inputs, state: Any) -> tuple[Tensor, Any]: ...


class Cache:
    """Keys and values so far, growing by concatenation. `fork` before a step leaves the older state as it was."""

    def __init__(self, held: KeyValue | None = None) -> None:
        self.held = held

    def fork(self) -> Cache:
        return Cache(self.held)

    def extend(self, new: KeyValue) -> KeyValue:
        if self.held is not None:
            new = KeyValue(torch.cat((self.held.key, new.key), dim=2), torch.cat((self.held.value, new.value), dim=2))
        self.held = new
        return new

    def select(self, rows: Tensor) -> Cache:
        return Cache(None if self.held is None else select(self.held, rows))


class FixedCache(Cache):
    """The same in one buffer of a given length, written in place: no copy a step.

    Two steps from one state would write over each other; `select` gives each branch its own buffer.
    """

    def __init__(self, capacity: int, held: KeyValue | None = None, buffer: KeyValue | None = None) -> None:
        super().__init__(held)
        self.capacity, self.buffer = capacity, buffer

    def fork(self) -> Cache:
        return FixedCache(self.capacity, self.held, self.buffer)

    def extend(self, new: KeyValue) -> KeyValue:
        start = 0 if self.held is None else self.held.key.shape[2]
        stop = start + new.key.shape[2]
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens and is asked to hold {stop}; start with a larger capacity")
        if self.buffer is None:
            self.buffer = KeyValue(*(self._room(part) for part in (new.key, new.value)))
        self.buffer.key[:, :, start:stop], self.buffer.value[:, :, start:stop] = new.key, new.value
        self.held = KeyValue(self.buffer.key[:, :, :stop], self.buffer.value[:, :, :stop])
        return self.held

    def _room(self, part: Tensor) -> Tensor:
        batch, heads, _, size = part.shape
        return part.new_empty(batch, heads, self.capacity, size)

    def select(self, rows: Tensor) -> Cache:
        chosen = FixedCache(self.capacity)
        if self.held is not None:
            chosen.extend(select(self.held, rows))
        return chosen


class Uncached(Cache):
    """Keeps nothing: for a forward over the whole text."""

    def extend(self, new: KeyValue) -> KeyValue:
        return new

    def fork(self) -> Cache:
        return self


def select(value: Any, rows: Tensor) -> Any:
    """The same structure with some of its batch rows; what is shared by all rows (batch 1) or is no tensor stays."""
    if isinstance(value, Tensor):
        return value if value.dim() and len(value) == 1 and len(rows) != 1 else value.index_select(0, rows)
    if isinstance(value, Cache):
        return value.select(rows)
    if isinstance(value, tuple | list):
        return type(value)(select(inner, rows) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: select(getattr(value, f.name), rows) for f in fields(value)})
    return value


def size_of(value: Any) -> int:
    """Bytes held by the tensors of a state."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Cache):
        return size_of(value.held)
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, f.name)) for f in fields(value))
    return 0


@dataclass(frozen=True)
class Seen:
    """What a tower has read so far."""

    caches: tuple[Cache, ...]
    length: int = 0
    positions: Tensor | None = None  # (B or 1)×length
    padding: Tensor | None = None  # B×length
    segments: Tensor | None = None  # B×length
    span: int | None = None  # how long the text may become

    def select(self, rows: Tensor) -> Seen:
        return select(self, rows)
