"""Loops: what a sequence of tokens repeats at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A sequence that repeats itself: `period` elements again and again, after `prefix` others."""

    prefix: int
    period: int


def find_repetition(tokens: Sequence[int]) -> Loop | None:
    """The loop at the end of a sequence, seen at least twice; None if its end does not repeat.

    Of all prefixes and periods that fit, it is the pair with the smallest sum, which is unique. It is what was seen,
    and no proof that a model that reads more than its last tokens would go on so.
    """
    matches = prefix_matches(tokens[::-1])
    # the last n tokens also occur `period` tokens earlier, so the last n + period have that period
    period = max(range(1, len(tokens)), key=lambda period: (matches[period] >= period, matches[period]), default=0)
    if not period or matches[period] < period:
        return None
    return Loop(len(tokens) - matches[period] - period, period)


def prefix_matches(tokens: Sequence[int]) -> list[int]:
    """For each index, the number of tokens from there that equal those from the start, in linear time (Z function)."""
    matches, start, stop = [len(tokens)] * len(tokens), 0, 0
    for i in range(1, len(tokens)):
        count = min(stop - i, matches[i - start]) if i < stop else 0
        while i + count < len(tokens) and tokens[count] == tokens[i + count]:
            count += 1
        matches[i] = count
        if i + count > stop:
            start, stop = i, i + count
    return matches
