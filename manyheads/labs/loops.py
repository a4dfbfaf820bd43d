"""Loops that are proven: greedy decoding with an n-gram model is a function of finitely many states."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeVar

import torch

from manyheads.errors import InputError
from manyheads.generate.loops import Loop
from manyheads.model.ngram import Ngram

State = TypeVar("State")
Context = tuple[int, ...]  # the last n − 1 tokens, which are all that an n-gram model reads


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
