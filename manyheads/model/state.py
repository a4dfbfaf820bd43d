"""What decoding carries from step to step: one protocol for caches, cross-attention and recurrent states.

`start` makes a state, `step` reads tokens and returns the logits and the next state, `select` keeps or repeats rows.
A state is passed and returned, never kept on a module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.model.spec import ModelSpec
from manyheads.parts.attention import KeyValue
from manyheads.spec import LARGEST


def check_state(state: Any, expected: type, spec: ModelSpec) -> None:
    """Refuses what is no state of this model."""
    if not isinstance(state, expected):
        raise ValueError(f"given a {type(state).__name__}, expected the state that start or the step before returned")
    started = state.spec  # type: ignore[attr-defined]
    if started is not spec and started != spec:
        raise ValueError("the state was started by another model; start one here")


def check_writes(writes: bool) -> None:
    if not writes:
        raise ValueError("a head that pools speaks of a whole text; only one that says something of each token writes token by token")


def check_rows_of(held: Tensor, batch: int) -> None:
    if held.shape[0] != batch:
        raise ValueError(f"the state holds {held.shape[0]} texts and is given the next tokens of {batch}")


def check_capacity(capacity: int | None) -> None:
    if capacity is not None and (type(capacity) is not int or not 1 <= capacity <= LARGEST):
        raise ValueError(f"capacity is {capacity}, expected the number of tokens the text may have, from 1 to {LARGEST}")


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


class Buffer:
    """Room for the keys and values of a text of a given length, and how much of it is written."""

    def __init__(self, like: KeyValue, capacity: int) -> None:
        self.key, self.value = (part.new_empty(part.shape[0], part.shape[1], capacity, part.shape[3]) for part in (like.key, like.value))
        self.filled = 0

    def write(self, new: KeyValue) -> KeyValue:
        start, self.filled = self.filled, self.filled + new.key.shape[2]
        self.key[:, :, start : self.filled], self.value[:, :, start : self.filled] = new.key, new.value
        return KeyValue(self.key[:, :, : self.filled], self.value[:, :, : self.filled])


class FixedCache(Cache):
    """The same in one buffer of a given length, written in place: no copy a step, one only where a text branches. No gradients."""

    def __init__(self, capacity: int, held: KeyValue | None = None, buffer: Buffer | None = None) -> None:
        super().__init__(held)
        self.capacity, self.buffer = capacity, buffer

    def fork(self) -> Cache:
        return FixedCache(self.capacity, self.held, self.buffer)

    def extend(self, new: KeyValue) -> KeyValue:
        length = 0 if self.held is None else self.held.key.shape[2]
        if length + new.key.shape[2] > self.capacity:
            wanted = length + new.key.shape[2]
            raise ValueError(f"the cache holds {self.capacity} tokens and is asked to hold {wanted}; start with a larger capacity")
        if self.buffer is None or self.buffer.filled != length:  # another branch has written on from here
            self.buffer = Buffer(new, self.capacity)
            if self.held is not None:
                self.buffer.write(self.held)
        self.held = self.buffer.write(new)
        return self.held

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
    """The same structure with some of its batch rows: every tensor of a state has the batch first; the rest stays."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
        raise ValueError("rows are chosen by a vector of whole numbers, such as torch.tensor([0, 0, 1])")
    if isinstance(value, Tensor):
        try:
            return value.index_select(0, rows)
        except IndexError:
            raise ValueError(f"there is no row {rows.tolist()} among {len(value)}, counted from 0") from None
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
    positions: Tensor | None = None  # B×length; counted from 0 if None
    padding: Tensor | None = None  # B×length
    segments: Tensor | None = None  # B×length
    prefix: Tensor | None = None  # B
    counted: bool = True  # whether the positions count tokens, so that none is past the length
    span: int | None = None  # how long the text may become

    def select(self, rows: Tensor) -> Seen:
        return select(self, rows)
