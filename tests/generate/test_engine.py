"""Laws of the engine: a request's tokens do not depend on others, memory is bounded and freed, nobody starves."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from kinds import VOCAB, decoder, first_choices, kind_id, ngram, pair, random_model, recurrent
from raising import raises

from manyheads import read_model
from manyheads.generate.config import generation_config
from manyheads.generate.decoding import RequestRules
from manyheads.generate.engine import MIN_PREFIX, Engine, Request, cache_tokens
from manyheads.generate.prefix_cache import PrefixCache
from manyheads.model.cache import KeyValueBuffer, state_bytes
from manyheads.parts.inputs import BATCH_TOKENS, Inputs
from manyheads.spec import to_tree

SCHEMES = [choice for choice in first_choices("position") if choice["kind"] != "rope"]
CORES = [choice for choice in first_choices("core") if choice["kind"] != "dot"]
SHAPES = {kind_id(choice): decoder(position=choice) for choice in SCHEMES}
SHAPES |= {kind_id(choice): decoder(core=choice) for choice in CORES} | {
    "rope": decoder(position="rope"),
    "window": decoder(position="rope", mask={"causal": True, "window": 3}),
    "kv_heads": decoder(position="alibi", attention={"kind": "heads", "heads": 4, "kv_heads": 2}),
    "pair": pair(),
    "recurrent": recurrent(),
    "lstmn": recurrent(cell="lstmn", source=False),
    "recurrent-decoder": recurrent(source=False),
    "ngram": ngram(),
}
MODELS = {name: random_model(spec, seed=3).double().eval() for name, spec in SHAPES.items()}
LONG = [3 + i % 19 for i in range(MIN_PREFIX + 5)]  # a common beginning


def rules(**settings):
    settings = {"max_new_tokens": 6, "eos_token_id": [2, 6]} | settings
    config = generation_config(**settings)
    return RequestRules(config, [spec.prepare(None) for spec in config.processors])


KINDS = {
    "greedy": rules(),
    "short": rules(max_new_tokens=1),
    "long": rules(max_new_tokens=11),
    "sampled": rules(temperature=1.5),
    "penalized": rules(repetition_penalty=1.7, no_repeat_ngram_size=2),
    "probabilities": rules(logprobs=3),
    "delayed": rules(min_new_tokens=5),
}


def request(model, ids, kind):
    rng = torch.Generator().manual_seed(len(ids)) if kind == "sampled" else None
    return Request(ids, KINDS[kind], rng, [1] if model.spec.has_source else ())


def requests_for(model, count=14, seed=0):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        rows.append(
            (LONG[: rng.randrange(MIN_PREFIX, len(LONG))] + ids if rng.random() < 0.4 else ids, rng.choice([*KINDS]))
        )
    return [request(model, ids, kind) for ids, kind in rows]


def results(engine, arrivals, cancelled=()):
    """The hypotheses of requests, submitted at their step; `cancelled` are removed at a step."""
    numbers, found, step = {}, {}, 0
    pending = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    cancelled = dict(cancelled)
    while pending or not engine.is_idle:
        while pending and arrivals[pending[0]][0] <= step:
            index = pending.pop(0)
            numbers[engine.submit(arrivals[index][1])] = index
        for index in [index for index, when in cancelled.items() if when == step]:
            for number in [number for number, other in numbers.items() if other == index]:
                engine.cancel(number)
        for token in engine.step():
            assert token.error is None
            if token.hypothesis is not None:
                found[numbers[token.number]] = token.hypothesis
        step += 1
        assert reserved_columns(engine) <= engine.max_cache_tokens
    return found


def reserved_columns(engine):
    """Tokens for which the engine has memory, by the buffers of its first layer."""
    states = [engine.state, *engine.prefixes.entries.values()]
    buffers = {id(cache.buffer): cache.buffer for state in states if (cache := first_cache(state)) is not None}
    sources = [state.cross_key_values[0] for state in states if getattr(state, "cross_key_values", None)]
    return sum(item.key.shape[0] * item.key.shape[2] for item in (*buffers.values(), *sources))


def first_cache(state):
    return state.decoder.caches[0] if hasattr(state, "decoder") else None


def same(first, second):
    assert (first.token_ids, first.is_finished) == (second.token_ids, second.is_finished)
    assert first.logprobs is None or first.logprobs == pytest.approx(second.logprobs, abs=1e-9)


def alone(model, seed=0):
    return [results(Engine(model), [(0, each)])[0] for each in requests_for(model, seed=seed)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_request_has_the_same_tokens_whatever_else_is_in_the_batch(name):
    model, rng = MODELS[name], random.Random(1)
    expected = alone(model)
    for max_cache_tokens, max_rows, last_arrival in ((90, 3, 12), (400, 64, 12), (2000, 64, 0)):
        engine = Engine(model, max_cache_tokens=max_cache_tokens, max_rows=max_rows)
        arrivals = [(rng.randint(0, last_arrival), each) for each in requests_for(model)]
        cancelled = {index: arrivals[index][0] + rng.randrange(4) for index in (2, 5, 11)}
        found = results(engine, arrivals, cancelled.items())
        assert set(range(len(expected))) - set(found) <= set(cancelled)
        for index, hypothesis in found.items():
            same(hypothesis, expected[index])


def test_some_requests_end_by_a_token_and_some_by_their_length():
    ends = [hypothesis.is_finished for name in ("none", "rope") for hypothesis in alone(MODELS[name])]
    assert 0 < sum(ends) < len(ends)


def test_a_common_beginning_is_read_once(monkeypatch):
    model, read, step = MODELS["rope"], [], MODELS["rope"].step
    monkeypatch.setattr(model, "step", lambda inputs, state: read.append(inputs) or step(inputs, state))
    rows = [[*LONG, i, i + 1] for i in range(3, 9)]
    together = results(Engine(model), [(0, request(model, ids, "short")) for ids in rows])
    num_read = sum(getattr(inputs, "tokens", inputs).numel() for inputs in read)
    assert num_read == len(LONG) + 2 * len(rows)
    read.clear()
    engine, later = Engine(model, max_rows=1), [(i, request(model, ids, "short")) for i, ids in enumerate(rows)]
    assert results(engine, later) == together  # each after the one before has ended
    num_read = sum(getattr(inputs, "tokens", inputs).numel() for inputs in read)
    assert num_read < len(LONG) * 2 + 3 * len(rows)


def test_prompts_with_a_common_beginning_are_read_in_batches_of_limited_size(monkeypatch):
    model, step, read = MODELS["ngram"], MODELS["ngram"].step, []
    monkeypatch.setattr(model, "step", lambda inputs, state: read.append(inputs) or step(inputs, state))
    rows = [[*LONG, *[i % 7] * 500] for i in range(8)] + [[*LONG, i] for i in range(8)]
    results(Engine(model), [(0, request(model, ids, "short")) for ids in rows])
    assert max(getattr(inputs, "tokens", inputs).numel() for inputs in read) <= BATCH_TOKENS


def test_a_known_beginning_is_not_read_again_beside_other_prompts(monkeypatch):
    model, step, read = MODELS["rope"], MODELS["rope"].step, []
    engine = Engine(model)
    results(engine, [(0, request(model, [*LONG, 3], "short"))])
    monkeypatch.setattr(model, "step", lambda inputs, state: read.append(inputs) or step(inputs, state))
    results(engine, [(0, request(model, ids, "short")) for ids in ([*LONG, 5], [9, 8, 7])])
    assert sum(getattr(inputs, "tokens", inputs).numel() for inputs in read) < len(LONG)


def test_the_least_recently_used_prefix_is_removed_first():
    model, cache = MODELS["rope"], PrefixCache(2)
    for ids in ([3, 4], [5, 6], [3, 4, 9], [7, 8]):
        state, num_read = cache.start(model, ids[:2], 9)
        assert num_read == (2 if ids == [3, 4, 9] else 0)
        if not num_read:
            cache.add(ids, model.step(torch.tensor([ids]), state)[1])
    assert [*cache.entries] == [(3, 4), (7, 8)]


def num_buffers():
    gc.collect()
    return sum(isinstance(item, KeyValueBuffer) for item in gc.get_objects())


@pytest.mark.parametrize("name", ["rope", "pair"])
def test_the_memory_of_the_cache_is_freed_when_all_requests_have_ended(name):
    model, before = MODELS[name], num_buffers()
    engine = Engine(model, max_cache_tokens=300)
    results(engine, [(i, each) for i, each in enumerate(requests_for(model))], [(3, 4), (6, 9)])
    assert engine.state is None
    assert not engine.running
    engine.prefixes.shrink(0)
    assert (engine.cache_tokens, num_buffers()) == (0, before)


@pytest.mark.parametrize("name", ["rope", "kv_heads", "pair"])
def test_memory_is_counted_in_tokens_of_the_cache(name):
    model = MODELS[name]
    state = model.start(torch.tensor([[3, 4]]) if model.spec.has_source else None, capacity=5)
    with torch.no_grad():
        _, state = model.step(torch.tensor([[1, 2, 3, 4, 5]]), state)
    assert cache_tokens(model, state_bytes(state.decoder.caches)) == 5


def test_a_request_that_can_never_fit_and_one_too_many_are_refused():
    model = MODELS["rope"]
    engine = Engine(model, max_cache_tokens=12, max_waiting=2)
    engine.submit(request(model, [3] * 7, "greedy"))  # 7 + 6 − 1: the last token is not read
    with raises("input.length"):
        engine.submit(request(model, [3] * 8, "greedy"))
    engine.submit(request(model, [3], "greedy"))
    with raises("generate.queue-full"):
        engine.submit(request(model, [3], "greedy"))
    engine.cancel(1)
    assert engine.submit(request(model, [3], "greedy")) == 3


def test_requests_begin_in_the_order_in_which_they_came():
    model = MODELS["rope"]
    engine, first = Engine(model, max_cache_tokens=60, max_rows=4), {}
    numbers = [engine.submit(request(model, [3] * (30 if i == 4 else 2), "long")) for i in range(12)]
    step = 0
    while not engine.is_idle:
        for token in engine.step():
            first.setdefault(token.number, step)
        step += 1
    assert [*first] == numbers
    assert [first[number] for number in numbers] == sorted(first.values())


def test_the_error_of_one_request_is_not_one_of_its_neighbors():
    tree = to_tree(SHAPES["rope"]) | {"head": {"kind": "untied"}}
    model = random_model(read_model(tree), seed=3).double().eval()
    good = [request(model, [7, 8, i], "long") for i in (9, 10, 11)]
    expected = [results(Engine(model), [(0, each)])[0] for each in good]
    with torch.no_grad():
        model.decoder.embed.table.weight[5] = torch.nan
    engine, found, errors = Engine(model), {}, {}
    for each in (good[0], request(model, [4, 5], "greedy"), *good[1:]):
        engine.submit(each)
    while not engine.is_idle:
        for token in engine.step():
            if token.error is not None:
                errors[token.number] = token.error.code
            if token.hypothesis is not None:
                found[token.number] = token.hypothesis
    assert errors == {2: "model.non-finite"}
    assert [found[number].token_ids for number in (1, 3, 4)] == [each.token_ids for each in expected]


@pytest.mark.parametrize("keep_answers", [False, True])
def test_a_request_that_fails_after_its_first_token_ends_with_its_error(keep_answers):
    tree = to_tree(SHAPES["rope"]) | {"head": {"kind": "untied"}}
    model = random_model(read_model(tree), seed=3)
    (first,) = results(Engine(model), [(0, request(model, [7, 8], "short"))]).values()
    with torch.no_grad():
        model.decoder.embed.table.weight[first.token_ids[0]] = torch.nan
    engine, errors = Engine(model, keep_answers=keep_answers), []
    engine.submit(request(model, [7, 8], "long"))
    while not engine.is_idle:
        errors += [token.error.code for token in engine.step() if token.error is not None]
    assert errors == ["model.non-finite"]
    assert [*engine.prefixes.entries] == []  # the prompt is shorter than a prefix that is kept


def test_states_that_join_say_whether_positions_were_given():
    model = MODELS["rope"]
    with torch.no_grad():
        states = [model.step(Inputs(torch.tensor([[3, 4]]), positions=positions), model.start(capacity=4))[1]
                  for positions in (None, torch.tensor([[5, 9]]))]  # fmt: skip
    joined = states[0].join([states[1]], 4).decoder
    assert joined.positions.tolist() == [[0, 1], [5, 9]]
    assert not joined.default_positions
