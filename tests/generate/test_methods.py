"""Prompt lookup against greedy decoding, contrastive and diverse beam search against literal oracles, states that are truncated."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from kinds import VOCAB, decoder, ngram, pair, random_model, recurrent, tokens
from raising import raises
from scripted import Scripted

import manyheads
from manyheads import Checkpoint, Inputs
from manyheads.generate.config import CheckpointSettings, generation_config, method_kinds
from manyheads.generate.decoding import GenerationBatch, run_to_end
from manyheads.model.recording import in_this_thread, record, record_hidden_states
from manyheads.spec import to_tree

UNTIED = {"head": {"kind": "untied"}, "init": {"kind": "normal", "std": 1.0}}


def checkpoint_of(spec, **options):
    return Checkpoint(random_model(manyheads.read_model(to_tree(spec) | UNTIED), **options))


def generate(checkpoint, ids, **settings):
    return checkpoint.generate(ids, **{"max_new_tokens": 12, "decoder_start_token_id": 1} | settings)


@cache
def model_of(spec, seed=1):
    """One model for all examples of a test."""
    return random_model(spec, seed=seed)


# ------------------------------------------------------------------------------------------------ states, truncated


@pytest.mark.parametrize("position", ["none", "sinusoidal", "rope", "relative", "alibi"])
@pytest.mark.parametrize("seed", range(8))
def test_a_truncated_state_continues_as_if_the_rest_had_not_been_read(position, seed):
    """Rows of different lengths; the state that was truncated can still be continued too."""
    model, rng = model_of(decoder(position=position)), torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (3, 9), generator=rng)
    lengths = torch.randint(1, 7, (3,), generator=rng)
    rows = [torch.cat((ids[row, :length], ids[row, 6:])) for row, length in enumerate(lengths.tolist())]
    alone, together = torch.cat([model(row[None])[:, -3:] for row in rows]), model(ids)[:, 6:]
    for capacity in (None, 12):
        _, whole = model.step(ids[:, :6], model.start(capacity=capacity))
        logits, _ = model.step(ids[:, 6:], whole.truncate(lengths))
        torch.testing.assert_close(logits, alone)
        again, _ = model.step(ids[:, 6:], whole)
        torch.testing.assert_close(again, together)


def test_going_on_from_a_truncated_state_copies_nothing_unless_it_must():
    model, ids = random_model(decoder()), tokens(2, 8)
    _, state = model.step(ids[:, :5], model.start(capacity=8))
    memory = state.decoder.caches[0].buffer.key.data_ptr()
    short = state.truncate(torch.tensor([3, 3]))
    _, beside = model.step(ids[:, 5:6], short)
    assert beside.decoder.caches[0].buffer.key.data_ptr() != memory, "the longer state is still in use"
    del state, beside
    _, after = model.step(ids[:, 5:6], short)
    assert after.decoder.caches[0].buffer.key.data_ptr() == memory


@pytest.mark.parametrize("spec", [recurrent(source=False), ngram()], ids=["recurrent", "ngram"])
def test_a_state_without_a_cache_cannot_be_truncated(spec):
    model = random_model(spec)
    _, state = model.step(tokens(2, 4), model.start())
    with raises("model.unsupported"):
        state.truncate(torch.tensor([2, 2]))
    with raises("model.unsupported"):
        Checkpoint(model).generate([1, 2, 1, 2], prompt_lookup_num_tokens=3)


# ---------------------------------------------------------------------------------------------------- prompt lookup


@pytest.mark.parametrize("name", ["decoder", "pair", "windowed"])
@pytest.mark.parametrize("seed", range(10))  # each of five models, with and without a processor
def test_prompt_lookup_gives_the_greedy_output(name, seed):
    spec = {
        "decoder": decoder(position="rope"),
        "pair": pair(),
        "windowed": decoder(mask={"causal": True, "window": 3}),
    }[name]
    checkpoint = Checkpoint(model_of(spec, seed=seed % 5))  # a tied head repeats itself, so drafts are accepted
    row = torch.randint(4, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    same = {"no_repeat_ngram_size": 4 if seed % 2 else 0}
    expected = generate(checkpoint, row, **same)
    for size in (1, 3, 10):
        assert generate(checkpoint, row, prompt_lookup_num_tokens=size, **same) == expected


def test_prompt_lookup_takes_fewer_steps_where_a_text_repeats_itself():
    checkpoint, lengths = Checkpoint(random_model(decoder())), []
    checkpoint.model.decoder.register_forward_hook(lambda module, args, output: lengths.append(args[0].length))
    expected = generate(checkpoint, [3, 4, 5], max_new_tokens=40)
    greedy_steps = len(lengths)
    lengths.clear()
    assert generate(checkpoint, [3, 4, 5], max_new_tokens=40, prompt_lookup_num_tokens=8) == expected
    assert len(lengths) < greedy_steps / 2


# ------------------------------------------------------------------------------------------------ contrastive search


def contrastive_oracle(model, ids, alpha, k, count, source=None):
    """One token after another, each candidate by a forward pass over the whole text."""
    text, prompt = list(ids), len(ids)

    def forward(row):
        target = Inputs(torch.tensor([row]))
        with record_hidden_states(model) as states:
            logits = model(target) if source is None else model(target, torch.tensor([source]))
        return logits[0, -1], states[-1][0]

    for _ in range(count):
        logits, hidden = forward(text)
        p = logits.softmax(-1)
        scores = {}
        for token in p.topk(k).indices.tolist():
            own = forward([*text, token])[1][-1]
            similarity = max(torch.cosine_similarity(own, state, dim=0).item() for state in hidden)
            scores[token] = (1 - alpha) * p[token].item() - alpha * similarity
        text.append(max(scores, key=scores.get))
    return text[prompt:]


@pytest.mark.parametrize("alpha", [0.3, 0.8])
@pytest.mark.parametrize("name", ["decoder", "pair"])
def test_contrastive_search_is_its_formula(name, alpha):
    checkpoint = checkpoint_of(pair() if name == "pair" else decoder(position="rope"))
    rows = [[3, 4, 5, 3], [7], [9, 9]]
    settings = {"max_new_tokens": 6, "penalty_alpha": alpha, "top_k": 4, "decoder_start_token_id": 1}
    together = checkpoint.generate(rows, **settings)
    with torch.no_grad():
        for i, row in enumerate(rows):
            start, source = ([1], row) if name == "pair" else (row, None)
            assert together[i] == contrastive_oracle(checkpoint.model, start, alpha, 4, 6, source)
    assert generate(checkpoint, rows[0], penalty_alpha=0.0001, top_k=1) == generate(checkpoint, rows[0])


def test_contrastive_search_needs_hidden_states():
    with raises("model.unsupported", "recurrent"):
        generate(Checkpoint(random_model(recurrent(source=False))), [3], penalty_alpha=0.6)


# ----------------------------------------------------------------------------------------------- diverse beam search


def diverse_oracle(model, ids, *, beams, groups, penalty, count):
    """Lists of (score, tokens), group by group, without eos: the best text of each group at the end."""
    live = [[(0.0, [])] for _ in range(groups)]
    for _ in range(count):
        used = torch.zeros(VOCAB, dtype=torch.float64)
        for group in range(groups):
            candidates = []
            for score, text in live[group]:
                logp = model(torch.tensor([[*ids, *text]]))[0, -1].log_softmax(-1) - penalty * used
                candidates += [(score + logp[token].item(), [*text, token]) for token in range(VOCAB)]
            live[group] = sorted(candidates, key=lambda item: -item[0])[: beams // groups]
            # as many as are computed for the case that some end
            for _, text in live[group]:
                used[text[-1]] += 1
    return sorted((item for group in live for item in group), key=lambda item: -item[0])


def test_diverse_beam_search_is_its_formula():
    checkpoint = checkpoint_of(decoder())
    with torch.no_grad():
        oracle = diverse_oracle(checkpoint.model, [3, 4], beams=4, groups=2, penalty=1.5, count=4)
    settings = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.5, "length_penalty": 0.0}
    found = generate(checkpoint, [3, 4], max_new_tokens=4, n=4, **settings)
    assert [result.token_ids for result in found] == [text for _, text in oracle]
    assert [result.score for result in found] == pytest.approx([score for score, _ in oracle])
    plain = generate(checkpoint, [3, 4], max_new_tokens=4, n=4, num_beams=4, length_penalty=0.0)
    assert [result.token_ids for result in plain] != [result.token_ids for result in found]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_without_a_penalty_every_group_of_diverse_beam_search_is_a_beam_search(early_stopping):
    checkpoint = checkpoint_of(decoder())
    for prompt in ([3, 4], [5], [1, 2, 6]):
        settings = {
            "n": 2,
            "eos_token_id": list(range(0, VOCAB, 3)),
            "length_penalty": 3.0,
            "early_stopping": early_stopping,
        }
        alone = [item.token_ids for item in generate(checkpoint, prompt, num_beams=2, **settings)]
        groups = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.0}
        together = [item.token_ids for item in generate(checkpoint, prompt, **settings | groups | {"n": 6})]
        assert sorted(together) == sorted(3 * alone)


class Markov(Scripted):
    """A language model of given probabilities: the next token depends on the last one alone."""

    def step(self, inputs, state):
        return self.steps[inputs.tokens], state


def test_every_search_returns_as_many_texts_as_asked_for():
    """Although a live text cannot reach the best one that is finished, long before there are n."""
    model = Markov([[0.01, 0.09, 0.9], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]])
    for method in ({"num_beams": 3}, {"decoding": {"kind": "gnmt-beam", "num_beams": 3}}):
        config = generation_config(CheckpointSettings(eos_token_id=(2,)), max_new_tokens=6, n=3, **method)
        (found,) = run_to_end(
            config.decoding.generate(GenerationBatch(model, Inputs(torch.tensor([[0]])), None, config, ()))
        )
        assert len(found) == 3, method


def two_groups(steps, stopping_criteria=None):
    """The texts of two groups of one beam, of which the second never takes a token that counts as chosen."""
    config = generation_config(
        CheckpointSettings(eos_token_id=(2,)),
        max_new_tokens=2,
        num_beams=2,
        num_beam_groups=2,
        diversity_penalty=10.0,
        length_penalty=0.0,
    )
    batch = GenerationBatch(
        Markov(steps), Inputs(torch.tensor([[2]])), None, config, (), stopping_criteria=stopping_criteria
    )
    (found,) = run_to_end(config.decoding.generate(batch))
    return [(result.token_ids, round(math.exp(result.score), 4)) for result in found]


@pytest.mark.parametrize("best", [0, 1])
def test_a_token_of_probability_0_is_not_chosen_by_a_group(best):
    """The first group ends at the second step, where all other tokens are impossible."""
    after_1 = [0.3, 0.7, 0.0] if best else [0.7, 0.3, 0.0]
    assert two_groups([[0.0, 0.0, 1.0], after_1, [0.6, 0.4, 0.0]]) == [([0, 2], 0.6), ([1, best], 0.28)]


def test_a_token_that_completes_a_stop_string_is_not_chosen_by_a_group_any_more_than_eos():
    steps = [[0.9, 0.1, 0.0], [0.7, 0.3, 0.0], [0.6, 0.4, 0.0]]
    assert two_groups(steps, lambda ids: ids == [0, 0]) == [([0, 0], 0.54), ([1, 0], 0.28)]
    assert two_groups(steps)[1][0] == [1, 1]


def test_the_best_of_n_beams_come_with_their_scores():
    checkpoint = checkpoint_of(decoder())
    found = generate(checkpoint, [3, 4], n=3, num_beams=5, logprobs=2, length_penalty=0.0)
    scores = [result.score for result in found]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(result.token_ids) for result in found}) == 3
    for result in found:
        assert sum(result.logprobs) == pytest.approx(result.score, abs=1e-6)
        whole = checkpoint.model(torch.tensor([[3, 4, *result.token_ids]]))[0, 1:-1].log_softmax(-1)
        expected = whole.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-6)
        assert [len(top) for top in result.top_logprobs] == [2] * len(result.token_ids)


def test_log_probabilities_are_the_models_own_before_processors():
    checkpoint = checkpoint_of(decoder())
    one = generate(checkpoint, [3, 4], temperature=3.0, top_k=4, repetition_penalty=2.0, logprobs=3, seed=5)
    whole = checkpoint.model(torch.tensor([[3, 4, *one.token_ids]]))[0, 1:-1].log_softmax(-1)
    assert one.logprobs == pytest.approx(whole.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist(), abs=1e-6)
    values, index = whole.topk(3)
    for top, own_values, own_index in zip(one.top_logprobs, values.tolist(), index.tolist(), strict=True):
        assert [name for name, _ in top] == [str(token) for token in own_index]
        assert [value for _, value in top] == pytest.approx(own_values, abs=1e-6)
    assert one.finish_reason == "length"


def test_samples_of_one_prompt_differ_and_the_first_is_that_of_n_1():
    checkpoint = checkpoint_of(decoder())
    several = generate(checkpoint, [3, 4], n=4, temperature=2.0, seed=1)
    assert len({tuple(text.token_ids) for text in several}) == 4
    assert several[0].token_ids == generate(checkpoint, [3, 4], temperature=2.0, seed=1)
    with raises("generate.config", "n is 2"):
        generate(checkpoint, [3, 4], n=2)


@pytest.mark.parametrize("kind", ["greedy", "prompt-lookup", "contrastive", "beam", "gnmt-beam", "diverse-beam"])
def test_more_sequences_than_a_method_returns_are_an_error(kind):
    checkpoint = checkpoint_of(decoder())
    count = 4 if "beam" in kind else 1
    assert len(generate(checkpoint, [3, 4], n=count, decoding=kind)) == count
    with raises("generate.config", f"n is {count + 1}", kind):
        generate(checkpoint, [3, 4], n=count + 1, decoding=kind)


# ---------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def frequent_switches():
    """Threads take turns after a microsecond, rather than after five milliseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize(
    "settings", [{"num_beams": 3, "coverage_penalty": 0.5}, {"penalty_alpha": 0.6, "top_k": 3}], ids=str
)
def test_two_threads_that_record_one_model_get_what_one_gets(settings):
    checkpoint, rows, barrier = checkpoint_of(pair()), [[3, 4, 5, 6, 7], [8, 9]], threading.Barrier(2)

    def texts(row):
        return generate(checkpoint, row, details=True, **settings)

    def several_rounds(row):
        results = []
        for _ in range(8):
            barrier.wait(60)
            try:
                results.append(texts(row))
            except BaseException:
                barrier.abort()
                raise
        return results

    expected = [texts(row) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(several_rounds, rows)) == [[item] * 8 for item in expected]


@pytest.mark.parametrize("recorder", [record, record_hidden_states])
def test_a_recording_has_the_calls_of_its_own_thread(recorder):
    model, ids = random_model(decoder()), tokens(1, 4)
    with ThreadPoolExecutor(1) as pool, recorder(model) as recorded:
        pool.submit(model, ids).result()
        assert not recorded
        model(ids)
        count = len(recorded)
        pool.submit(model, ids).result()
        assert len(recorded) == count > 0


def test_a_hook_ignores_calls_of_other_threads():
    """Even without keyword arguments, as torch may call one while another thread adds or removes it."""
    hook = in_this_thread(lambda module, args, kwargs: args)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hook, "module", "args").result() is None
    assert hook("module", "args", {}) == "args"


@pytest.mark.parametrize("kind", method_kinds())
def test_a_model_that_computes_nan_is_an_error_that_names_the_layer_in_every_method(kind):
    """Of the model's file, exit status 4, not of the caller's settings."""
    model = random_model(decoder())
    with torch.no_grad():
        model.last.layers[1].feedforward.up.weight[0, 0] = math.nan
    with raises("model.non-finite", "layers.1.feedforward.up"):
        Checkpoint(model).generate([3, 4, 3], decoding=kind, max_new_tokens=3)
