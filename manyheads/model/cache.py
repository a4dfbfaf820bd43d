"""The state of decoding (key/value caches, and what a stack has read) and the base of models without caches.

`start` returns a state, `step` reads tokens and returns logits and the next state, `select` keeps or repeats rows. A
state is an argument and a return value, not an attribute of a module.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import InputError, InputLengthError, InputShapeError, UnsupportedError
from manyheads.model.spec import ModelSpec
from manyheads.parts.attention import KeyValue
from manyheads.parts.inputs import INTEGERS, Inputs, Memory, tokens_first
from manyheads.spec import MAX_COUNT


def check_state(state: Any, expected: type, spec: ModelSpec) -> None:
    if not isinstance(state, expected):
        raise InputError(f"given a {type(state).__name__}, expected the state that start or step returned")
    state_spec = state.spec  # type: ignore[attr-defined]
    if state_spec is not spec and state_spec != spec:
        raise InputError("this state was started by another model")


def check_can_generate(model: Any) -> None:
    if not model.spec.head.per_token:
        raise UnsupportedError("a pooled head cannot generate: it gives one output per sequence")
    if not model.can_generate:
        raise UnsupportedError("this model cannot generate; only a decoder with a causal mask can")


def check_batch(tensor: Tensor, batch: int) -> None:
    if tensor.shape[0] != batch:
        raise InputShapeError(f"the state has {tensor.shape[0]} rows, but the new tokens have {batch}")


def check_capacity(capacity: int | None) -> None:
    if capacity is not None and (type(capacity) is not int or not 1 <= capacity <= MAX_COUNT):
        raise InputLengthError(f"capacity is {capacity}, expected a number of tokens from 1 to {MAX_COUNT}")


class Cache:
    """Keys and values of all tokens so far, which grow by concatenation.

    Each step works on a copy (`fork`), so an earlier state can be continued again.
    """

    def __init__(self, key_value: KeyValue | None = None) -> None:
        self.key_value = key_value

    def fork(self) -> Cache:
        return Cache(self.key_value)

    def extend(self, new: KeyValue) -> KeyValue:
        if (old := self.key_value) is not None:
            new = KeyValue(torch.cat((old.key, new.key), dim=2), torch.cat((old.value, new.value), dim=2))
        self.key_value = new
        return new

    @property
    def length(self) -> int:
        return 0 if self.key_value is None else self.key_value.key.shape[2]

    def select(self, rows: Tensor) -> Cache:
        return Cache(None if self.key_value is None else select(self.key_value, rows))

    def with_capacity(self, capacity: int) -> Cache:
        """The same keys and values in a cache with room for `capacity` tokens."""
        return self.fork()

    def gather(self, columns_BL: Tensor) -> Cache:
        """A cache with these columns of each row."""
        if self.key_value is None:
            return self.fork()
        return Cache(
            KeyValue(*(gather_columns(part, columns_BL) for part in (self.key_value.key, self.key_value.value)))
        )

    def truncate(self, length: int) -> Cache:
        """The cache of the first `length` tokens; nothing is copied."""
        cache = self.fork()
        if cache.key_value is not None:
            cache.key_value = KeyValue(cache.key_value.key[:, :, :length], cache.key_value.value[:, :, :length])
        return cache


def gather_columns(x_BHLK: Tensor, columns_BM: Tensor) -> Tensor:
    """x[b, :, columns[b]] for each row b."""
    return x_BHLK.gather(2, columns_BM[:, None, :, None].expand(-1, x_BHLK.shape[1], -1, x_BHLK.shape[3]))


class KeyValueBuffer:
    """Memory for the keys and values of `capacity` tokens, which several caches may share."""

    def __init__(self, key: Tensor, value: Tensor, capacity: int) -> None:
        self.key, self.value = (
            part.new_empty(part.shape[0], part.shape[1], capacity, part.shape[3]) for part in (key, value)
        )
        self.users: weakref.WeakSet[StaticCache] = weakref.WeakSet()

    def write(self, new: KeyValue, start: int) -> None:
        end = start + new.key.shape[2]
        self.key[:, :, start:end], self.value[:, :, start:end] = new.key, new.value

    def read(self, length: int) -> KeyValue:
        return KeyValue(self.key[:, :, :length], self.value[:, :, :length])

    def is_free_after(self, length: int, user: StaticCache) -> bool:
        """Whether no other cache that is still in use has more than `length` tokens in the buffer."""
        return all(other is user or other.length <= length for other in self.users)


class StaticCache(Cache):
    """A cache of fixed capacity without gradients, written in place.

    It is copied only if an earlier state is continued while a later one that shares its memory is still in use.
    """

    def __init__(
        self, capacity: int, key_value: KeyValue | None = None, buffer: KeyValueBuffer | None = None, length: int = 0
    ) -> None:
        self.capacity, self.buffer = capacity, buffer
        self.outside = key_value  # keys and values that are not in a buffer yet
        self._length = length if key_value is None else key_value.key.shape[2]
        if buffer is not None:
            buffer.users.add(self)

    @property
    def length(self) -> int:
        return self._length

    @property
    def key_value(self) -> KeyValue | None:  # type: ignore[override]
        """A view of the buffer, made when it is used: a plan reads the buffer itself."""
        return self.outside if self.buffer is None else self.buffer.read(self._length)

    def fork(self) -> StaticCache:
        return StaticCache(self.capacity, self.outside, self.buffer, self._length)

    def with_capacity(self, capacity: int) -> Cache:
        return StaticCache(capacity, self.key_value)  # copied into a buffer of this size by the next step

    def truncate(self, length: int) -> Cache:
        if self.outside is not None:
            return StaticCache(
                self.capacity, KeyValue(*(part[:, :, :length] for part in (self.outside.key, self.outside.value)))
            )
        return StaticCache(self.capacity, None, self.buffer, min(length, self._length))

    def extend(self, new: KeyValue) -> KeyValue:
        start, count = self._length, new.key.shape[2]
        self.reserve(count, new.key, new.value).write(new, start)
        assert self.buffer is not None
        return self.buffer.read(self._length)

    def reserve(self, count: int, key: Tensor, value: Tensor) -> KeyValueBuffer:
        """Makes room for `count` tokens, which the caller writes to the buffer; `key` and `value` give its sizes."""
        length, new_length = self._length, self._length + count
        if new_length > self.capacity:
            raise InputLengthError(
                f"the cache has a capacity of {self.capacity} tokens, needed {new_length}; start with a larger capacity"
            )
        if self.buffer is None or not self.buffer.is_free_after(length, self):
            old = self.key_value
            self.buffer = KeyValueBuffer(key, value, self.capacity)
            self.buffer.users.add(self)
            self.outside = None
            if old is not None:
                self.buffer.write(old, 0)
        self._length = new_length
        return self.buffer

    def select(self, rows: Tensor) -> Cache:
        cache = StaticCache(self.capacity)
        if (key_value := self.key_value) is not None:
            cache.extend(select(key_value, rows))
        return cache


class NoCache(Cache):
    """A cache that stores nothing, for a forward pass over the whole sequence."""

    def extend(self, new: KeyValue) -> KeyValue:
        return new

    def fork(self) -> Cache:
        return self


def select(value: Any, rows: Tensor) -> Any:
    """Selects batch rows of every tensor in a structure. The batch is the first axis of every tensor of a state."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in INTEGERS:
        raise InputShapeError("expected a vector of integers as row indices, such as torch.tensor([0, 0, 1])")
    if isinstance(value, Tensor):
        try:
            return value.index_select(0, rows)
        except IndexError:
            raise InputShapeError(f"row {int(rows.max())} is outside the batch of {len(value)}") from None
    if isinstance(value, Cache):
        return value.select(rows)
    if isinstance(value, tuple | list):
        return type(value)(select(inner, rows) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: select(getattr(value, f.name), rows) for f in fields(value)})
    return value


def state_bytes(value: Any) -> int:
    """The size of all tensors of a state in bytes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Cache):
        return state_bytes(value.key_value)
    if isinstance(value, tuple | list):
        return sum(map(state_bytes, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(state_bytes(getattr(value, f.name)) for f in fields(value))
    return 0


class State:
    """The decoding state of a model. The batch is the first axis of every tensor."""

    def select(self, rows: Tensor) -> Self:
        """The state of the selected rows; a row may be left out or repeated."""
        return select(self, rows)

    def truncate(self, lengths: Tensor) -> Self:
        """The state after the first `lengths` tokens of each row, padding included."""
        raise UnsupportedError("this model has no cache of its tokens, so its state cannot be truncated")

    def resume(self, length: int, capacity: int) -> Self | None:
        """The state after the first `length` tokens of its only row, with room for `capacity`; None if it cannot."""
        return None

    def join(self, others: Sequence[Self], capacity: int) -> Self:
        """The rows of this state and then those of others as one batch, with room for `capacity` tokens.

        All rows end at the same column. What each of them has read, and so its next output, stays the same.
        """
        raise UnsupportedError("states of this model cannot be joined")


def join_rows(parts: Sequence[Tensor], *, dim: int, left: bool = False, value: float = 0) -> Tensor:
    """Concatenates batches that differ in size `dim`, padded to the largest, on the right or on the left."""
    size = max(part.shape[dim] for part in parts)

    def pad(part: Tensor) -> Tensor:
        count = size - part.shape[dim]
        sides = (count, 0) if left else (0, count)
        return part if not count else F.pad(part, (*[0, 0] * (part.dim() - 1 - dim), *sides), value=value)

    return torch.cat([pad(part) for part in parts])


def join_memories(memories: Sequence[Memory]) -> Memory:
    """The memories of several batches as one, padded on the right."""
    masks = [
        torch.zeros(m.states.shape[:2], dtype=torch.bool, device=m.states.device)
        if m.padding_mask is None
        else m.padding_mask
        for m in memories
    ]
    positions = [memory.key_positions().expand(len(memory.states), -1) for memory in memories]
    return Memory(
        join_rows([memory.states for memory in memories], dim=1),
        join_rows(positions, dim=1),
        join_rows(masks, dim=1, value=True),
        default_positions=all(memory.default_positions for memory in memories),
    )


def align_key_values(parts: Sequence[KeyValue], length: int, capacity: int) -> StaticCache:
    """A cache with the rows of several, all of which end at the column `length`."""
    rows = sum(len(part.key) for part in parts)
    key, value = (x.new_empty(rows, x.shape[1], 0, x.shape[3]) for x in (parts[0].key, parts[0].value))
    buffer = KeyValueBuffer(key, value, capacity)
    row = 0
    for part in parts:
        start, end = length - part.key.shape[2], row + len(part.key)
        for whole, new in ((buffer.key, part.key), (buffer.value, part.value)):
            whole[row:end, :, :start] = 0  # a weight of 0 times what memory holds could be NaN
            whole[row:end, :, start:length] = new
        row = end
    return StaticCache(capacity, None, buffer, length)


@dataclass(frozen=True)
class StackState(State):
    """The inputs that a stack has read so far, and its caches."""

    caches: tuple[Cache, ...]
    length: int = 0
    positions: Tensor | None = None  # B×length; None means 0, 1, 2, …
    padding_mask: Tensor | None = None  # B×length
    document_ids: Tensor | None = None  # B×length
    prefix_lengths: Tensor | None = None  # B
    # True if the caller passed no positions, so every position is < length
    default_positions: bool = True
    final_length: int | None = None  # the length of the sequence after generation, if known

    def resume(self, length: int, capacity: int) -> StackState:
        key_value = self.caches[0].key_value if self.caches else None
        state = self.truncate(torch.tensor([length], device=None if key_value is None else key_value.key.device))
        caches = tuple(cache.with_capacity(capacity) for cache in state.caches)
        return replace(state, caches=caches, final_length=capacity)

    def join(self, others: Sequence[StackState], capacity: int) -> StackState:
        states = [state.right_aligned() for state in (self, *others)]
        masks = [state.padding_mask for state in states if state.padding_mask is not None]
        positions = [state.positions for state in states if state.positions is not None]
        padding_mask, length = join_rows(masks, dim=1, left=True, value=True), max(state.length for state in states)
        layers = zip(*(state.caches for state in states), strict=True)
        key_values = ([part for cache in layer if (part := cache.key_value) is not None] for layer in layers)
        return StackState(
            caches=tuple(align_key_values(parts, length, capacity) for parts in key_values),
            length=length,
            positions=join_rows(positions, dim=1, left=True),
            padding_mask=padding_mask,
            default_positions=all(state.default_positions for state in states),
        ).without_defaults()

    def right_aligned(self) -> StackState:
        """The same rows with explicit positions and padding, all of it on the left and no more than is needed."""
        key_value = self.caches[0].key_value if self.caches else None
        if key_value is None or self.document_ids is not None or self.prefix_lengths is not None:
            raise UnsupportedError("only states that have read tokens, without packed documents and prefixes, can join")
        shape, device = (len(key_value.key), self.length), key_value.key.device
        positions = torch.arange(self.length, device=device)[None] if self.positions is None else self.positions
        positions, padding_mask, caches = positions.expand(shape), self.padding_mask, self.caches
        if padding_mask is None:
            padding_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        start = int(padding_mask.sum(dim=1).min())
        order = tokens_first(~padding_mask)[:, start:]
        if padding_mask.any():
            caches = tuple(cache.gather(order) for cache in caches)
        return replace(
            self,
            caches=caches,
            length=self.length - start,
            positions=positions.gather(1, order),
            padding_mask=padding_mask.gather(1, order),
        )

    def without_defaults(self) -> StackState:
        """The same state, without a mask if there is no padding, nor positions if these are 0, 1, 2, …"""
        assert self.positions is not None
        assert self.padding_mask is not None
        if self.padding_mask.any():
            return self
        is_default = bool((self.positions == torch.arange(self.length, device=self.positions.device)).all())
        return replace(self, padding_mask=None, positions=None if is_default else self.positions)

    def truncate(self, lengths: Tensor) -> StackState:
        """Rows that are shorter than the longest get padding, so that all have one length."""
        longest, padding_mask, positions = int(lengths.max()), self.padding_mask, self.positions
        if not 1 <= int(lengths.min()) <= longest <= self.length:
            raise InputLengthError(
                f"given lengths up to {longest}, expected 1 to {self.length}, the tokens of the state"
            )
        beyond = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        if beyond.any():
            padding_mask = beyond if padding_mask is None else padding_mask[:, :longest] | beyond
            if positions is None:
                positions = torch.arange(longest, device=lengths.device).expand(len(lengths), -1)
        return replace(
            self,
            caches=tuple(cache.truncate(longest) for cache in self.caches),
            length=longest,
            positions=None if positions is None else positions[:, :longest],
            padding_mask=None if padding_mask is None else padding_mask[:, :longest],
            document_ids=None if self.document_ids is None else self.document_ids[:, :longest],
        )


StateType = TypeVar("StateType", bound=State)


class StepwiseModel(nn.Module, Generic[StateType]):
    """The base of the recurrent and the n-gram network, whose forward pass is one `step` over the whole sequence.

    `forward` works with any head, `start` and `step` with one per token.
    """

    spec: ModelSpec
    head: nn.Module
    stacks: tuple[()] = ()
    hidden_names: tuple[str, ...] = ()  # activations that a probe reads in place of the layers of a stack
    last_cross_core: nn.Module | None = None  # of the attention to the source

    @property
    @abstractmethod
    def table(self) -> Tensor | None:
        """The token table."""

    @property
    def can_generate(self) -> bool:
        """Whether the model can generate, which needs a head with one output per token."""
        return self.spec.head.per_token

    def forward(
        self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Logits, B×L×V. With `logits_to_keep`, B×L, only those where it is True, N×V."""
        logits = self.step(inputs, self.initial_state(source))[0]
        return logits if logits_to_keep is None else logits[logits_to_keep]

    def last_hidden_state(
        self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the head reads, B×L×D, and its padding mask."""
        inputs = Inputs.of(inputs)
        return self.hidden_step(inputs, self.initial_state(source))[0], inputs.padding_mask

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> StateType:
        """The state before the first token. `capacity` has no effect, because no memory is reserved."""
        check_capacity(capacity)
        check_can_generate(self)
        return self.initial_state(source)

    @abstractmethod
    def initial_state(self, source: Inputs | Tensor | None) -> StateType:
        """The state before the first token."""

    def step(self, inputs: Inputs | Tensor, state: StateType) -> tuple[Tensor, StateType]:
        """Logits after each of the new tokens, one or many, and the next state."""
        inputs = Inputs.of(inputs)
        hidden_BLD, state = self.hidden_step(inputs, state)
        return self.head(hidden_BLD, table=self.table, padding_mask=inputs.padding_mask), state

    @abstractmethod
    def hidden_step(self, inputs: Inputs, state: StateType) -> tuple[Tensor, StateType]:
        """What the head reads at each of the new tokens, and the next state."""
