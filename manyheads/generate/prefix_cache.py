"""Decoding states of prompts that were read before, for prompts that begin in the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from manyheads.model.builder import Model
from manyheads.parts.inputs import Inputs
from manyheads.spec import MAX_COUNT


class PrefixCache:
    """The states after some sequences of tokens, to be continued from the longest common prefix.

    The output for a prompt is the same as without it. The least recently used entries are removed first.
    """

    def __init__(self, max_entries: int = 1, min_length: int = 1) -> None:
        self.max_entries, self.min_length = max_entries, min_length
        self.entries: OrderedDict[tuple[int, ...], Any] = OrderedDict()  # states of one row, without padding

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.entries))

    def start(self, model: Model, ids: Sequence[int], capacity: int, source: Inputs | None = None) -> tuple[Any, int]:
        """A state with room for `capacity` tokens that has read a prefix of these, and the length of the prefix."""
        lengths = {entry: common_prefix([entry, ids]) for entry in self.entries}
        entry = max(lengths, key=lengths.__getitem__, default=None)
        if entry is None or lengths[entry] < self.min_length:
            return model.start(source, capacity=capacity), 0
        self.entries.move_to_end(entry)
        return self.entries[entry].resume(lengths[entry], capacity), lengths[entry]

    def add(self, ids: Sequence[int], state: Any, max_tokens: int = MAX_COUNT) -> None:
        """Keeps the state after these tokens, if it can be continued and all entries together have no more tokens."""
        if self.min_length <= len(ids) <= max_tokens and state.resume(len(ids), len(ids)) is not None:
            self.entries.pop(tuple(ids), None)
            self.shrink(max_tokens - len(ids), self.max_entries - 1)
            self.entries[tuple(ids)] = state

    def shrink(self, max_tokens: int, max_entries: int = MAX_COUNT) -> None:
        """Removes entries until few enough are left."""
        while self.entries and (self.num_tokens > max_tokens or len(self.entries) > max_entries):
            self.entries.popitem(last=False)


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The number of first tokens that all rows share."""
    for i, tokens in enumerate(zip(*rows, strict=False)):
        if any(token != tokens[0] for token in tokens):
            return i
    return min(map(len, rows))
