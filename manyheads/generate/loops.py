"""Loops: proven for greedy decoding with an n-gram model, a function of finitely many states, or seen in tokens."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from manyheads.errors import InputError
from manyheads.model.ngram import Ngram

State = TypeVar("State")
Context = tuple[int, ...]  # the last n − 1 tokens, which are all that an n-gram model reads


@dataclass(frozen=True)
class Loop:
    """A sequence that repeats itself: `period` elements again and again, after `prefix` others."""

    prefix: int
    period: int


def find_loop(next_state: Callable[[State], State], start: State) -> Loop:
    """The loop of start, f(start), f(f(start)), …: exact, with at most two states in memory.

    Brent 1980, "An improved Monte Carlo factorization algorithm", section 7. It ends if the states are finitely many:
    with S of them, prefix + period ≤ S, because the first prefix + period states differ.
    """
    power = period = 1
    slow, fast = start, next_state(start)
    while slow != fast:
        if period == power:
            slow, power, period = fast, 2 * power, 0
        fast, period = next_state(fast), period + 1
    slow = fast = start
    for _ in range(period):
        fast = next_state(fast)
    prefix = 0
    while slow != fast:
        slow, fast, prefix = next_state(slow), next_state(fast), prefix + 1
    return Loop(prefix, period)


def ngram_successor(model: Ngram, eos_token_id: Container[int] = ()) -> Callable[[Context], Context]:
    """Greedy decoding with an n-gram model, as a function of the last n − 1 tokens; an eos token is a fixed point.

    There are V^(n−1) contexts, so each text enters a loop, or ends, within as many tokens.
    """
    length = model.num_previous + 1

    @torch.no_grad()
    def next_context(context: Context) -> Context:
        if len(context) != length:
            raise InputError(f"the context has {len(context)} tokens, expected {length}")
        if context[-1] in eos_token_id:
            return context
        logits = model(torch.tensor([context], device=model.embedding.weight.device))
        return (*context[1:], int(logits[0, -1].argmax()))

    return next_context


def find_repetition(tokens: Sequence[int]) -> Loop | None:
    """The loop at the end of a sequence, seen at least twice; None if its end does not repeat.

    Of all prefixes and periods that fit, it is the pair with the smallest sum, which is unique. It is what was seen,
    and no proof that a model that reads more than its last tokens would go on so.
    """
    matches = prefix_matches(tokens[::-1])
    # the last n tokens also occur `period` tokens earlier, so the last n + period have that period
    period = max(range(1, len(tokens)), key=lambda one: (matches[one] >= one, matches[one]), default=0)
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
