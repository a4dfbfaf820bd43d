"""Loops: Brent's method and the search in tokens against brute force, and the proof that n-gram models loop."""

from __future__ import annotations

import itertools

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import random_model
from raising import raises

import manyheads
from manyheads import Checkpoint
from manyheads.generate.loops import Loop, find_repetition
from manyheads.labs.chapters.temperature_loops import find_loop, ngram_successor


def first_repeat(next_state, start):
    """The loop by remembering every state."""
    seen, state = {}, start
    while state not in seen:
        seen[state] = len(seen)
        state = next_state(state)
    return Loop(seen[state], len(seen) - seen[state])


def smallest_repetition(tokens):
    """Of all prefixes and periods that fit, those with the smallest sum."""
    pairs = itertools.product(range(len(tokens)), range(1, len(tokens)))
    fitting = [
        (prefix, period)
        for prefix, period in pairs
        if len(tokens) - prefix >= 2 * period and tokens[prefix : len(tokens) - period] == tokens[prefix + period :]
    ]
    if not fitting:
        return None
    best = min(map(sum, fitting))
    (only,) = [pair for pair in fitting if sum(pair) == best]
    return Loop(*only)


@given(successors=st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
def test_the_loop_of_a_function_is_the_one_found_by_remembering_every_state(successors):
    loop = find_loop(successors.__getitem__, 0)
    assert loop == first_repeat(successors.__getitem__, 0)
    assert loop.prefix + loop.period <= len(successors)


@given(
    prefix=st.lists(st.integers(0, 2), max_size=8),
    period=st.lists(st.integers(0, 2), max_size=6),
    more=st.integers(0, 20),
)
def test_the_repetition_in_tokens_is_the_smallest_of_all(prefix, period, more):
    repeated = list(itertools.islice(itertools.cycle(period), more)) if period else []
    assert find_repetition(prefix + repeated) == smallest_repetition(prefix + repeated)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("a", None),
        ("ab", None),
        ("aa", Loop(0, 1)),
        ("xyabab", Loop(2, 2)),
        ("aabaabaa", Loop(0, 3)),  # not the last two alone
        ("abcabcab", Loop(0, 3)),
        ("abcabd", None),
    ],
)
def test_repetitions(text, expected):
    assert find_repetition([ord(item) for item in text]) == expected


@given(
    vocab=st.integers(2, 6),
    order=st.integers(2, 4),
    seed=st.integers(0, 1000),
    eos=st.booleans(),
    data=st.data(),
)
def test_every_ngram_model_loops_under_greedy_decoding(vocab, order, seed, eos, data):
    """Within V^(n−1) contexts; generation then has the same prefix and period, and a text that ends is a fixed point."""
    spec = manyheads.read_model(
        {
            "vocab": vocab,
            "ngram": {"width": 4, "order": order},
            "head": "untied",
            "init": {"kind": "normal", "std": 1.0},
        }
    )
    model, eos_token_id = random_model(spec, seed=seed), (0,) if eos else ()
    start = tuple(data.draw(st.lists(st.integers(1, vocab - 1), min_size=order - 1, max_size=order - 1)))
    successor = ngram_successor(model, eos_token_id)
    loop = find_loop(successor, start)
    assert loop == first_repeat(successor, start)
    assert loop.prefix + loop.period <= vocab ** (order - 1)
    count = loop.prefix + 2 * loop.period + order
    tokens = Checkpoint(model).generate(list(start), max_new_tokens=count)
    state, expected = start, []
    for _ in range(count):
        state = successor(state)
        expected.append(state[-1])
    if eos and 0 in expected:
        end = expected.index(0)
        assert (tokens[:end], loop.period, set(expected[end:])) == (expected[:end], 1, {0})
    else:
        assert tokens == expected
        later = (list(start) + tokens)[loop.prefix :]
        assert later[: -loop.period] == later[loop.period :]
        assert find_repetition(list(start) + tokens) == loop


def test_a_context_of_another_length_is_an_error():
    with raises("input.invalid"):
        find_loop(ngram_successor(random_model(kinds.ngram())), (1,))


@torch.no_grad()
def test_the_successor_is_the_argmax_of_the_model():
    model = random_model(kinds.ngram())
    assert ngram_successor(model)((3, 4)) == (4, int(model(torch.tensor([[3, 4]]))[0, -1].argmax()))
