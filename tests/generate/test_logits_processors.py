"""Logits processors: each against transformers' or against its formula, and the distribution that is sampled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from scripted import Scripted, chi2_tail, frequencies, processed
from transformers.generation import logits_process as theirs

from manyheads.generate.config import choose_processor, generation_config, processor_kinds
from manyheads.generate.logits_processor import LogitsProcessorContext
from manyheads.generate.processors.tokens import MAX_SEQUENCES
from manyheads.spec import Part

VOCAB = 24
EOS = (2, 5)


def make_context(tokens, num_generated=3, remaining=4):
    return LogitsProcessorContext(torch.tensor(tokens), num_generated, remaining, EOS)


TOKENS = [[7, 3, 7, 9, 4, 7, 9], [1, 1, 1, 6, 8, 1, 1], [2, 9, 9, 9, 9, 3, 9]]
LENGTH, GENERATED = 7, 3
# a processor, and what transformers calls it
SAME = [
    ({"kind": "temperature", "temperature": 0.7}, theirs.TemperatureLogitsWarper(0.7)),
    ({"kind": "top-k", "top_k": 5}, theirs.TopKLogitsWarper(5)),
    ({"kind": "top-p", "top_p": 0.6}, theirs.TopPLogitsWarper(0.6)),
    ({"kind": "min-p", "min_p": 0.2}, theirs.MinPLogitsWarper(0.2)),
    ({"kind": "typical", "typical_p": 0.5}, theirs.TypicalLogitsWarper(0.5)),
    ({"kind": "repetition", "repetition_penalty": 1.7}, theirs.RepetitionPenaltyLogitsProcessor(1.7)),
    ({"kind": "no-repeat-ngram", "no_repeat_ngram_size": 1}, theirs.NoRepeatNGramLogitsProcessor(1)),
    ({"kind": "no-repeat-ngram", "no_repeat_ngram_size": 2}, theirs.NoRepeatNGramLogitsProcessor(2)),
    ({"kind": "no-repeat-ngram", "no_repeat_ngram_size": 3}, theirs.NoRepeatNGramLogitsProcessor(3)),
    (
        {"kind": "bad-words", "bad_words_ids": [[4], [7, 9, 3], [1, 8], [9, 9, 9, 9, 9]]},
        theirs.NoBadWordsLogitsProcessor([[4], [7, 9, 3], [1, 8], [9, 9, 9, 9, 9]]),
    ),
    (
        {"kind": "sequence-bias", "sequence_bias": [[[4], 2.5], [[7, 9, 3], -1.5], [[9, 8], 0.5]]},
        theirs.SequenceBiasLogitsProcessor([[[4], 2.5], [[7, 9, 3], -1.5], [[9, 8], 0.5]]),
    ),
    (
        {"kind": "min-new-tokens", "min_new_tokens": 4},
        theirs.MinNewTokensLengthLogitsProcessor(LENGTH - GENERATED, 4, list(EOS)),
    ),
    (
        {"kind": "min-new-tokens", "min_new_tokens": 3},
        theirs.MinNewTokensLengthLogitsProcessor(LENGTH - GENERATED, 3, list(EOS)),
    ),
    ({"kind": "min-length", "min_length": 8}, theirs.MinLengthLogitsProcessor(8, list(EOS))),
    ({"kind": "min-length", "min_length": 7}, theirs.MinLengthLogitsProcessor(7, list(EOS))),
    ({"kind": "suppress-tokens", "suppress_tokens": [3, 4]}, theirs.SuppressTokensLogitsProcessor([3, 4])),
    (
        {"kind": "begin-suppress-tokens", "begin_suppress_tokens": [3, 4]},
        theirs.SuppressTokensAtBeginLogitsProcessor([3, 4], LENGTH - GENERATED),
    ),
    ({"kind": "forced-eos", "forced_eos_token_id": [2]}, theirs.ForcedEOSTokenLogitsProcessor(LENGTH + 4, [2])),
    ({"kind": "forced-bos", "forced_bos_token_id": [3]}, theirs.ForcedBOSTokenLogitsProcessor(3)),
]


@pytest.mark.parametrize(("ours", "other"), SAME, ids=lambda item: item["kind"] if isinstance(item, dict) else "")
@given(seed=st.integers(0, 1000))
def test_a_processor_is_that_of_transformers(ours, other, seed):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    before = logits.clone()
    context = make_context(TOKENS)
    torch.testing.assert_close(choose_processor(ours).apply(logits, context), other(context.tokens, logits.clone()))
    assert torch.equal(logits, before), "the given logits stay as they are"


@pytest.mark.parametrize(
    ("ours", "other", "tokens", "generated"),
    [
        (SAME[-1][0], SAME[-1][1], [[3], [4], [5]], 0),
        (SAME[-3][0], SAME[-3][1], [row[: LENGTH - GENERATED] for row in TOKENS], 0),
    ],
)
def test_a_processor_of_the_first_step_is_that_of_transformers(ours, other, tokens, generated):
    logits, context = torch.randn(3, VOCAB), make_context(tokens, generated)
    output = choose_processor(ours).apply(logits, context)
    torch.testing.assert_close(output, other(context.tokens, logits.clone()))
    assert not torch.equal(output, logits)


def test_the_last_step_is_forced():
    logits, context = torch.randn(3, VOCAB), make_context(TOKENS, remaining=1)
    output = choose_processor({"kind": "forced-eos", "forced_eos_token_id": [2]}).apply(logits, context)
    assert output.argmax(-1).tolist() == [2, 2, 2]
    assert output.isfinite().sum() == 3


def test_presence_and_frequency_count_the_generated_tokens_alone():
    logits, context = torch.zeros(3, VOCAB), make_context(TOKENS, num_generated=4)  # 9 4 7 9 · 6 8 1 1 · 9 9 3 9
    presence = choose_processor({"kind": "presence", "presence_penalty": 0.5}).apply(logits, context)
    frequency = choose_processor({"kind": "frequency", "frequency_penalty": 0.25}).apply(logits, context)
    for row, counts in enumerate(({9: 2, 4: 1, 7: 1}, {6: 1, 8: 1, 1: 2}, {9: 3, 3: 1})):
        expected = [counts.get(token, 0) for token in range(VOCAB)]
        assert (presence[row] / -0.5).tolist() == [bool(count) for count in expected]
        assert (frequency[row] / -0.25).tolist() == expected


def test_a_logit_bias_is_added_and_padding_is_no_token():
    logits = torch.zeros(1, VOCAB)
    bias = choose_processor({"kind": "logit-bias", "logit_bias": {3: 1.5, "4": -2.0}})
    assert bias.apply(logits, make_context([[-1, 1]])).tolist()[0][3:5] == [1.5, -2.0]
    for spec in (
        {"kind": "repetition", "repetition_penalty": 2.0},
        {"kind": "no-repeat-ngram", "no_repeat_ngram_size": 1},
    ):
        changed = choose_processor(spec).apply(torch.ones(1, VOCAB), make_context([[-1, -1, 1]])) != 1
        assert changed.nonzero().tolist() == [[0, 1]]


def test_a_forced_prefix_is_generated_first():
    prefix = choose_processor({"kind": "forced-prefix", "forced_prefix_ids": [8, 3]})
    for generated, expected in ((0, 8), (1, 3)):
        output = prefix.apply(torch.randn(3, VOCAB), make_context(TOKENS, generated))
        assert output.isfinite().nonzero()[:, 1].tolist() == [expected] * 3
    logits = torch.randn(3, VOCAB)
    assert torch.equal(prefix.apply(logits, make_context(TOKENS, 2)), logits)


def test_top_p_keeps_no_token_beyond_a_sum_of_exactly_p():
    """Four equal probabilities are exact in binary, and two of them sum to 0.5."""
    kept = choose_processor({"kind": "top-p", "top_p": 0.5}).apply(torch.zeros(1, 4), make_context([[0]])).isfinite()
    assert kept.sum() == 2


def test_every_processor_has_a_test_and_a_formula():
    tested = {spec["kind"] for spec, _ in SAME}
    tested |= {"presence", "frequency", "logit-bias", "forced-prefix", "renormalize"}
    tested |= {"json-schema", "regex"}  # in test_constrained.py
    tested |= {"forced-prefix-text"}  # in test_laws.py
    assert tested == set(processor_kinds())
    for kind in processor_kinds().values():
        assert kind.summary() != "no formula given"
        assert all(field.description for field in kind.model_fields.values())
        name, off = kind.selector()
        for value in (off, *([[]] if off == () else [])):
            assert not [item for item in generation_config(**{name: value}).processors if isinstance(item, kind)]


# what transformers applies, in its order
ORDER = {
    "logit_bias": lambda bias: theirs.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
    "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
    "temperature": theirs.TemperatureLogitsWarper,
    "top_k": theirs.TopKLogitsWarper,
    "top_p": theirs.TopPLogitsWarper,
    "min_p": theirs.MinPLogitsWarper,
    "typical_p": theirs.TypicalLogitsWarper,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"typical_p": 0.6},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 3, "typical_p": 0.5},
        {"temperature": 1.0, "repetition_penalty": 1.8},
        {"temperature": 1.0, "logit_bias": {1: 1.0}},
    ],
    ids=str,
)
def test_samples_follow_the_processed_distribution(settings):
    """Chi-square of 5,000 samples against the probabilities after the processors."""
    config, count = generation_config(max_new_tokens=1, **settings), 5_000
    model = Scripted([[0.55, 0.2, 0.12, 0.07, 0.04, 0.02]])
    expected = model.steps
    for name, make in ORDER.items():
        if name in settings:
            expected = make(settings[name])(torch.tensor([[0]]), expected.clone())
    expected = expected.softmax(-1)[0].double()
    sampled = frequencies(model, config, count, 6).double()
    assert (sampled[expected == 0] == 0).all()
    possible = expected > 0
    chi = count * ((sampled - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi2_tail(chi, int(possible.sum()) - 1) > 1e-6


@given(seed=st.integers(0, 100))
def test_k3_entropy_rises_with_the_temperature(seed):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    entropies = []
    for temperature in (0.1, 0.5, 1.0, 2.0, 10.0):
        config = generation_config(temperature=temperature)
        p = processed(config, logits, torch.tensor([[0]])).softmax(-1)
        entropies.append(-(p * p.log()).nansum().item())
    assert entropies == sorted(entropies)
    assert entropies[-1] <= math.log(VOCAB) + 1e-12


def test_too_many_bad_words_are_refused():
    with raises("generate.config", "bad_words_ids"):
        generation_config(bad_words_ids=[[token] for token in range(MAX_SEQUENCES + 1)])
    assert isinstance(choose_processor({"kind": "bad-words", "bad_words_ids": [[3]] * 50_000}), Part)


@pytest.mark.parametrize("name", ["forced_prefix_ids", "suppress_tokens", "begin_suppress_tokens"])
def test_a_token_outside_the_vocabulary_is_refused(name):
    config = generation_config(**{name: [-1]})
    with raises("model.unsupported", -1):
        processed(config, torch.zeros(1, 9), torch.tensor([[3]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_processors_compute_in_float32_whatever_the_model_does(dtype):
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for settings in (
        {"temperature": 1e-4},
        {"top_p": 0.99},
        {"typical_p": 0.9},
        {"temperature": 1.0, "logit_bias": {5: 1e30}},
    ):
        config = generation_config(**settings)
        output = processed(config, logits, torch.tensor([[0]]))
        assert torch.equal(output, processed(config, logits.float(), torch.tensor([[0]])))
        assert not output.softmax(-1).isnan().any()
