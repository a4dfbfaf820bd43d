"""Decoding methods: beam search against all texts and against transformers, batches against single texts, sampling."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from kinds import VOCAB, decoder, ngram, padded, pair, random_model, recurrent, tokens
from raising import raises
from scripted import Scripted, frequencies, prepared
from small_checkpoints import CASES, folder_of, make, perturbed

import manyheads
from manyheads import Checkpoint, Inputs
from manyheads.errors import ManyheadsError
from manyheads.generate.config import (
    CheckpointSettings,
    GenerationConfig,
    choose_decoding,
    fields_of,
    generation_config,
    make_processors,
    processor_kinds,
)
from manyheads.generate.decoding import DecodingSpec, GenerationBatch, TokenByTokenSpec, run_to_end
from manyheads.generate.methods.gnmt import GnmtBeamSpec
from manyheads.model.recording import record
from manyheads.spec import field, to_tree
from manyheads.tasks.evaluation import EvalOptions

SHAPES = {
    "decoder": decoder(),
    "windowed": decoder(mask={"causal": True, "window": 3}, position={"kind": "rope"}),
    "pair": pair(position={"kind": "sinusoidal"}),
    "recurrent": recurrent(),
    "recurrent-language": recurrent(source=False),
    "ngram": ngram(),
}
UNTIED = {"head": {"kind": "untied"}, "init": {"kind": "normal", "std": 1.0}}  # a tied head tends to repeat its input
SHAPES = {name: manyheads.read_model(to_tree(spec) | UNTIED) for name, spec in SHAPES.items()}


def settings(**fields):
    of_processors = {name: value for name, value in fields.items() if name in fields_of(processor_kinds().values())}
    own = {name: value for name, value in fields.items() if name not in of_processors}
    processors = make_processors(choose_decoding("sample"), of_processors)
    return GenerationConfig(**{"max_new_tokens": 12, "processors": processors} | own)


SEVERAL_EOS = settings(eos_token_id=(2, 6, 10, 14, 18))


def has_source(name):
    return name in ("pair", "recurrent")


def prompt_and_source(name, batch=3, length=4):
    """Random ids; the source is None if the shape has none."""
    if has_source(name):
        return torch.ones(batch, 1, dtype=torch.long), tokens(batch, length)
    return tokens(batch, length), None


def decode(method, model, prompt, source=None, *, config, rng=()):
    source = None if source is None else Inputs.of(source)
    batch = GenerationBatch(model, Inputs.of(prompt), source, config, prepared(config), rng)
    return [hypotheses[0].token_ids for hypotheses in run_to_end(choose_decoding(method).generate(batch))]


def beam(model, prompt, source=None, *, num_beams=4, length_penalty=0.6, config):
    method = {"kind": "gnmt-beam", "num_beams": num_beams, "length_penalty": length_penalty}
    return decode(method, model, prompt, source, config=config)


def greedy(model, prompt, source=None, *, config):
    return decode("greedy", model, prompt, source, config=config)


def until_eos(rows, eos):
    """Rows up to their first end token, which is kept."""
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def with_varied_ends(model, prompt, source, config):
    """The config with two end tokens, selected so that the texts end at different steps."""
    texts = greedy(model, prompt, source, config=config)
    pairs = itertools.combinations(range(VOCAB), 2)
    return replace(config, eos_token_id=max(pairs, key=lambda eos: len(set(map(len, until_eos(texts, eos))))))


# -------------------------------------------------------------------------------------------------------- beam search


@torch.no_grad()
def log_likelihoods(model, prompt, source, texts):
    """log p of each text, by one forward pass over all whole texts."""
    longest = max(map(len, texts))
    targets = torch.tensor([[*text, *[-1] * (longest - len(text))] for text in texts])
    whole = torch.cat((prompt.expand(len(texts), -1), targets.clamp(min=0)), dim=1)
    logits = model(whole) if source is None else model(whole, source.expand(len(texts), -1))
    log_probs = logits[:, -longest - 1 : -1].log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return log_probs.masked_fill(targets < 0, 0.0).sum(dim=1).tolist()


def every_text(vocab, max_length, eos):
    """All texts that end in an end token, or at the limit."""
    inside = [token for token in range(vocab) if token not in eos]
    for length in range(1, max_length + 1):
        last = range(vocab) if length == max_length else eos
        yield from ([*before, end] for before in itertools.product(inside, repeat=length - 1) for end in last)


def small(name, vocab=4):
    flat = {"vocab": vocab, "init": {"kind": "normal", "std": 0.2}}  # many texts are about equally probable
    return random_model(manyheads.read_model(to_tree(SHAPES[name]) | flat), seed=5)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("eos", [(2,), (2, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_with_a_beam_per_text_the_best_of_all_texts_is_found(name, eos, length_penalty):
    model, (prompt, source) = small(name), prompt_and_source(name)
    prompt, source = prompt % 4, None if source is None else source % 4
    config = settings(max_new_tokens=4, eos_token_id=eos)
    outputs = beam(model, prompt, source, num_beams=4**4, length_penalty=length_penalty, config=config)
    for i, output in enumerate(outputs):
        own = prompt[i : i + 1], None if source is None else source[i : i + 1]
        texts = list(every_text(4, 4, eos))
        scores = [
            log_p / ((5 + len(text)) / 6) ** length_penalty
            for text, log_p in zip(texts, log_likelihoods(model, *own, texts), strict=True)
        ]
        assert output == texts[scores.index(max(scores))]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", SHAPES)
def test_with_a_beam_per_text_the_best_of_the_texts_with_a_prefix_is_found(name, length_penalty):
    model, (prompt, source) = small(name), prompt_and_source(name, batch=1)
    prompt, source = prompt % 4, None if source is None else source % 4
    config = settings(max_new_tokens=4, eos_token_id=(2,), forced_prefix_ids=(3, 1))
    (output,) = beam(model, prompt, source, num_beams=4**4, length_penalty=length_penalty, config=config)
    texts = [text for text in every_text(4, 4, (2,)) if text[:2] == [3, 1]]
    log_ps = log_likelihoods(model, prompt, source, texts)
    scores = [p / ((5 + len(text)) / 6) ** length_penalty for text, p in zip(texts, log_ps, strict=True)]
    assert output == texts[scores.index(max(scores))]


def test_many_beams_find_more_probable_texts_than_one():
    """Two beams need not: the text of one beam may fall out of two on its way (−29.5 in all against −28.6 here)."""
    model, prompt = random_model(SHAPES["decoder"]), tokens(16, 3)
    config = replace(SEVERAL_EOS, max_new_tokens=6)
    outputs = [beam(model, prompt, num_beams=count, length_penalty=0.0, config=config) for count in (1, 16)]
    one, many = (
        [log_likelihoods(model, prompt[i : i + 1], None, [text])[0] for i, text in enumerate(texts)]
        for texts in outputs
    )
    assert sum(many) > sum(one) + 1


@pytest.mark.parametrize("length_penalty", [0.0, 8.0])
@pytest.mark.parametrize("name", SHAPES)
def test_one_beam_is_greedy(name, length_penalty):
    model = random_model(SHAPES[name])
    prompt, source = prompt_and_source(name, batch=8)
    config = with_varied_ends(model, prompt, source, settings())
    output = beam(model, prompt, source, num_beams=1, length_penalty=length_penalty, config=config)
    assert output == greedy(model, prompt, source, config=config)
    assert len({len(row) for row in output}) > 1, "some end before others, or nothing was tested"


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_gives_what_each_text_gives_alone(name, side, num_beams):
    """Prompts of many lengths, padded on either side, whose texts end at many steps and leave the batch."""
    model, counts = random_model(SHAPES[name]), [6, 1, 4, 2, 5, 3]
    ids = tokens(len(counts), 6)
    batch, start = padded(ids, counts, side, filler=2), torch.ones(len(counts), 1, dtype=torch.long)
    inputs = (start, batch) if has_source(name) else (batch, None)
    config = with_varied_ends(model, *inputs, settings(bad_words_ids=((5,), (9, 4), (3, 3))))

    def generate(prompt, source):
        if num_beams == 1:
            return greedy(model, prompt, source, config=config)
        return beam(model, prompt, source, num_beams=num_beams, config=config)

    together = generate(*inputs)
    alone = [ids[i : i + 1, :count] for i, count in enumerate(counts)]
    assert together == [
        generate(start[:1], result)[0] if has_source(name) else generate(result, None)[0] for result in alone
    ]
    assert len({len(row) for row in together}) > 1


def test_finished_rows_leave_the_batch_and_a_source_is_encoded_once():
    model, prompt, source = random_model(SHAPES["pair"]), torch.ones(8, 1, dtype=torch.long), tokens(8, 5)
    decoded, encoded = [], []
    model.decoder.register_forward_hook(lambda module, inputs, output: decoded.append(len(inputs[0].tokens)))
    model.encoder.register_forward_hook(lambda module, inputs, output: encoded.append(len(inputs[0].tokens)))
    config = replace(SEVERAL_EOS, max_new_tokens=20)
    output = beam(model, prompt, source, num_beams=3, config=config)
    assert decoded[0] == 8, "a prompt is read once, whatever the number of beams"
    assert decoded == sorted(decoded[:1]) + sorted(decoded[1:], reverse=True)
    assert decoded[-1] < 24
    assert encoded == [8]
    decoded.clear()
    texts = greedy(model, prompt, source, config=config)
    assert decoded == [sum(len(row) > step for row in texts) for step in range(max(map(len, texts)))]
    assert len(output) == 8


def test_a_higher_length_penalty_gives_longer_texts():
    """A text may end now, or go on at a price that falls: the higher α, the later it ends."""
    model = Scripted([[0.0, 0.5, 0.5], [0.0, 0.45, 0.55], [0.0, 0.4, 0.6], [0.0, 0.35, 0.65], [0.0, 1.0, 0.0]])
    config, lengths = settings(max_new_tokens=5, eos_token_id=(1,)), []
    for length_penalty in (0.0, 0.5, 1.0, 2.0, 3.0, 4.0):
        (text,) = beam(model, torch.tensor([[0]]), num_beams=8, length_penalty=length_penalty, config=config)
        lengths.append(len(text))
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 5)


def test_a_search_ends_when_no_text_can_become_better():
    model = Scripted([[0.01, 0.98, 0.01]])
    steps = []
    step = model.step
    model.step = lambda inputs, state: steps.append(inputs.batch_size) or step(inputs, state)
    config, prompt = settings(max_new_tokens=50, eos_token_id=(1,)), torch.tensor([[0]])
    assert beam(model, prompt, num_beams=4, length_penalty=0.0, config=config) == [[1]]
    assert len(steps) == 1, "0.01 is less than 0.98 already"
    steps.clear()
    beam(model, prompt, num_beams=4, length_penalty=5.0, config=config)
    assert 1 < len(steps) < 10, "four have ended"


# ---------------------------------------------------------------------------------------------------- coverage penalty


@torch.no_grad()
def log_coverages(model, prompt, source, texts):
    """Σ_i log min(Σ_t a_ti, 1) of each text, by a forward pass over the whole text."""
    values = []
    for length, group in itertools.groupby(texts, key=len):
        several = torch.tensor(list(group))[:, :-1]
        rows = len(several)
        with record(model) as attentions:
            model(torch.cat((prompt.expand(rows, -1), several), dim=1), source.expand(rows, -1))
        if model.spec.recurrent:  # one attention per token
            weights = torch.cat([attention.weights()[:, 0] for attention in attentions], dim=1)
        else:
            (last,) = [attention for attention in attentions if attention.name == "decoder.layers.1.cross"]
            weights = last.weights().mean(dim=1)
        values += weights[:, -length:].sum(dim=1).clamp(max=1).log().sum(dim=1).tolist()
    return values


@pytest.mark.parametrize("coverage_penalty", [0.2, 5.0])
@pytest.mark.parametrize("name", ["pair", "recurrent"])
def test_with_a_beam_per_text_the_best_covered_of_all_texts_is_found(name, coverage_penalty):
    """Sources of different lengths in a batch: padding is not to be covered."""
    model, eos, counts = small(name), (2,), [4, 2, 3]
    prompt, source = torch.ones(3, 1, dtype=torch.long), tokens(3, 4) % 4
    config = settings(max_new_tokens=4, eos_token_id=eos)
    method = {"kind": "gnmt-beam", "num_beams": 4**4, "coverage_penalty": coverage_penalty}
    found = run_to_end(
        choose_decoding(method).generate(
            GenerationBatch(model, Inputs(prompt), padded(source, counts, "right"), config, ())
        )
    )
    texts, plain = list(every_text(4, 4, eos)), []
    for i, (best, *_) in enumerate(found):
        own = prompt[:1], source[i : i + 1, : counts[i]]
        pairs = zip(log_likelihoods(model, *own, texts), log_coverages(model, *own, texts), texts, strict=True)
        scores = [(p / ((5 + len(text)) / 6) ** 0.6, coverage_penalty * c) for p, c, text in pairs]
        totals = [p + c for p, c in scores]
        assert best.token_ids == texts[totals.index(max(totals))]
        assert best.score == pytest.approx(max(totals))
        plain.append(texts[max(range(len(texts)), key=lambda k: scores[k][0])])
    assert coverage_penalty < 1 or plain != [best.token_ids for best, *_ in found], "coverage changed no text"


@pytest.mark.parametrize("name", ["pair", "decoder"])
def test_without_a_coverage_penalty_no_attention_to_a_source_is_needed_and_scores_are_the_same(name):
    model, (prompt, source) = random_model(SHAPES[name]), prompt_and_source(name)
    batch = GenerationBatch(model, Inputs(prompt), None if source is None else Inputs(source), SEVERAL_EOS, ())
    expected = run_to_end(choose_decoding("gnmt-beam").generate(batch))
    assert run_to_end(choose_decoding({"kind": "gnmt-beam", "coverage_penalty": 0.0}).generate(batch)) == expected


def test_a_coverage_penalty_selects_its_beam_search():
    assert generation_config(num_beams=3, coverage_penalty=0.3).decoding.kind == "gnmt-beam"
    assert generation_config(num_beams=3, coverage_penalty=0).decoding.kind == "beam"


@pytest.mark.parametrize("spec", [decoder(), ngram(), recurrent(source=False), recurrent(attention=False)], ids=str)
def test_a_model_without_attention_to_a_source_is_refused(spec):
    with raises("model.unsupported", spec.architecture):
        Checkpoint(random_model(spec)).generate([3, 4], coverage_penalty=0.2, decoder_start_token_id=1)


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_samples_are_drawn_from_softmax_of_logits_over_t(temperature):
    """Within five standard deviations; softmax(logits) and softmax(logits / √T) are far outside."""
    count, probabilities = 5_000, [0.6, 0.25, 0.1, 0.04, 0.01]
    model = Scripted([probabilities])
    expected = (model.steps[0] / temperature).softmax(-1)
    output = frequencies(model, generation_config(temperature=temperature, max_new_tokens=1), count, 5)
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((output - expected).abs() <= 5 * deviation + 1e-9).all(), (output, expected)
    for other in (1.0, temperature**0.5) if temperature != 1 else ():
        wrong = (model.steps[0] / other).softmax(-1)
        assert ((output - wrong).abs() > 5 * deviation).any(), f"the test cannot tell {temperature} from {other}"


def test_the_temperature_of_the_caller_is_that_of_the_method():
    hot = generation_config(temperature=0.3)
    assert (hot.decoding.kind, [item.temperature for item in hot.processors]) == ("sample", [0.3])
    assert generation_config(temperature=0.0).decoding == choose_decoding("greedy") == GenerationConfig().decoding
    model, prompt = random_model(SHAPES["decoder"]), tokens(8, 3)
    rng = [torch.Generator().manual_seed(i) for i in range(8)]
    cold = decode("sample", model, prompt, config=settings(temperature=1e-6), rng=rng)
    assert cold == greedy(model, prompt, config=settings()), "towards 0 it becomes greedy"


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("num_beams", [1, 4])
def test_forced_tokens_are_generated_and_forbidden_ones_never(num_beams):
    """First and last tokens that must be, tokens and pairs that must not; nothing follows the token that ends a text."""
    model, (prompt, source) = random_model(pair()), prompt_and_source("pair", batch=6)
    config = settings(
        max_new_tokens=6,
        eos_token_id=(2, 3),
        forced_bos_token_id=(9,),
        forced_eos_token_id=(2,),
        bad_words_ids=((4,), (5,), (9, 6), (7, 7)),
    )
    for row in beam(model, prompt, source, num_beams=num_beams, config=config):
        assert row[0] == 9
        assert len(row) < 6 or row[-1] == 2
        assert not {4, 5} & set(row)
        assert not {(9, 6), (7, 7)} & set(itertools.pairwise(row))
        assert not {2, 3} & set(row[:-1])
    with raises("model.unsupported", VOCAB):
        beam(model, prompt, source, num_beams=num_beams, config=settings(forced_bos_token_id=(VOCAB,)))


def test_a_forced_first_token_is_for_texts_of_one_token_whatever_else_is_in_the_batch():
    model, config = random_model(decoder()), settings(max_new_tokens=3, forced_bos_token_id=(9,))
    batch = Inputs(torch.tensor([[0, 0, 5], [6, 7, 8]]), padding_mask=torch.tensor([[True, True, False], [False] * 3]))
    one, other = greedy(model, batch, config=config)
    assert one == greedy(model, torch.tensor([[5]]), config=config)[0]
    assert other == greedy(model, torch.tensor([[6, 7, 8]]), config=settings(max_new_tokens=3))[0]
    assert one[0] == 9


WRONG = {
    "max_new_tokens": (True, 1.5, "3", 0, -1, 2**70),
    "seed": (-1, 2**63, 2**70, 1.5, "1", True),
    "temperature": (-1, float("nan"), float("inf"), 1e-9, 1e9, "hot", "1", None, True, False),
    "num_beams": (0, -1, 257, 1.5, "2", None, True),
    "length_penalty": (-11, 11, float("nan"), "1", None, True),
    "decoding": ("no-such-method", 3, {"kind": "beam", "beams": 2}, {"kind": "gnmt-beam", "length_penalty": -1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_refused_by_name(name):
    selector = {"num_beams": 2} if name == "length_penalty" else {}
    for value in WRONG[name]:
        with raises("generate.config", "" if name == "decoding" else name):
            generation_config(**selector, **{name: value})


def test_a_setting_of_a_method_that_is_not_selected_is_refused():
    for value in (0.0, 2.0):
        with raises("generate.config", "length_penalty", "beam", "num_beams"):
            generation_config(length_penalty=value)
    with raises("generate.config", "length_penalty"):
        generation_config(length_penalty=1.0, temperature=1.0)
    assert generation_config(length_penalty=1.0, num_beams=1).decoding.kind == "greedy"
    with raises("generate.config", "length_penalty", -50):
        generation_config(length_penalty=-50.0, num_beams=1)


def test_settings_that_exclude_each_other_are_refused():
    for conflicting in (
        {"num_beams": 2, "temperature": 1.0},
        {"decoding": "greedy", "num_beams": 2},
        {"decoding": "greedy", "temperature": 1.0},
        {"decoding": {"kind": "beam", "length_penalty": 1.0}, "length_penalty": 0.0},
    ):
        with raises("generate.config"):
            generation_config(**conflicting)


# ------------------------------------------------------------------------------------------------ methods of your own


class LongestBeamSpec(GnmtBeamSpec, kind="test-longest-beam"):
    """argmax_y |y|"""

    def score(self, logp, length):
        return float(length)


def test_settings_reach_the_method_that_they_select():
    chosen = generation_config(num_beams=3, length_penalty=2.0).decoding
    assert (chosen.kind, chosen.num_beams, chosen.length_penalty) == ("beam", 3, 2.0)
    for beams in (1, 3):
        options = EvalOptions(settings={"num_beams": beams, "length_penalty": 2.0})
        chosen = options.generation(CheckpointSettings(), default_max_new_tokens=1).decoding
        assert (chosen.kind, chosen.num_beams, chosen.length_penalty) == ("gnmt-beam", beams, 2.0)


def test_a_method_derived_from_another_is_selected_only_by_its_own_name():
    assert generation_config(num_beams=2).decoding.kind == "beam"
    assert (
        generation_config(decoding={"kind": "test-longest-beam", "num_beams": 2}).decoding.kind == "test-longest-beam"
    )


FORCED, BAD_WORDS = {"forced_bos_token_id": 9, "forced_eos_token_id": 2}, {"bad_words_ids": [[5], [7, 8], [31]]}
SEARCHES = [({}, True), ({}, False), ({}, "never"), (FORCED, True), (FORCED, "never"), (BAD_WORDS, False)]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "gpt2", "llama"])
def test_four_beams_find_what_transformers_finds(name, length_penalty, tmp_path):
    """For each meaning of early_stopping, with the settings of the checkpoint."""
    torch.manual_seed(1)
    architecture, config, options = CASES[name]
    theirs = perturbed(make(architecture, config, **options)).eval()
    theirs.save_pretrained(tmp_path / name)
    for (extra, early_stopping), length in zip(SEARCHES, (1, 3, 4, 3, 4, 1), strict=True):
        same = {"num_beams": 4, "length_penalty": length_penalty, "early_stopping": early_stopping}
        generation = {"eos_token_id": [2, 11], "decoder_start_token_id": 3, "pad_token_id": 60, "bos_token_id": 1}
        (tmp_path / name / "generation_config.json").write_text(json.dumps(generation | extra | same))
        theirs.generation_config = type(theirs.generation_config)(**generation | extra | same)
        ours = manyheads.load(tmp_path / name)
        ids = torch.randint(12, 60, (16, length), generator=torch.Generator().manual_seed(length))
        output = theirs.generate(ids, do_sample=False, max_new_tokens=9)
        rows = until_eos(output[:, 1 if theirs.config.is_encoder_decoder else length :].tolist(), (2, 11))
        expected = [[token for token in row if token not in (2, 11)] for row in rows]
        assert ours.generate(ids.tolist(), max_new_tokens=9) == expected


class LeastSpec(TokenByTokenSpec, kind="test-least"):
    """argmin_v p(v | x_<t) among the `width` most probable tokens"""

    width: int = field(2, "tokens to choose from", ge=1)

    def next_tokens(self, logits_BV, rng):
        return logits_BV.topk(self.width).indices[:, -1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_method_of_your_own_is_a_kind_of_the_slot(name):
    checkpoint = Checkpoint(random_model(SHAPES[name]))
    start = {"decoder_start_token_id": 1} if has_source(name) else {}
    settings = {"max_new_tokens": 5} | start
    assert DecodingSpec.kinds["test-least"] is LeastSpec
    one, two = (
        checkpoint.generate([3, 4, 5], decoding={"kind": "test-least", "width": width}, **settings) for width in (1, 2)
    )
    assert one == checkpoint.generate([3, 4, 5], **settings), "the most probable of one is greedy"
    assert checkpoint.generate([3, 4, 5], decoding=LeastSpec(), **settings) == two
    assert checkpoint.generate([3, 4, 5], decoding="test-least", **settings) == two != one
    with raises("generate.config", "width", 0):
        checkpoint.generate([3, 4, 5], decoding={"kind": "test-least", "width": 0}, **settings)


def test_every_method_is_documented_and_has_a_formula():
    for kind, method in DecodingSpec.kinds.items():
        assert method.summary() != "no formula given", kind
        assert all(item.description for item in method.model_fields.values()), kind


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", ["decoder", "pair", "dynamic"])
def test_a_checkpoint_generates_for_each_text_as_if_alone(name, temperature):
    """Positions that run out at different lengths, angles that depend on the length, and random draws are each text's own."""
    scaling = {"kind": "longrope", "short_factor": [1.0], "long_factor": [50.0], "length": 12}
    dynamic = name == "dynamic"
    position = {"kind": "rope", "scaling": scaling} if dynamic else {"kind": "learned", "length": 12}
    spec = pair(position=position) if name == "pair" else decoder(position=position)
    checkpoint = Checkpoint(random_model(manyheads.read_model(to_tree(spec) | UNTIED) if dynamic else spec))
    rows = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [6, 7], [5], [9, 8, 7, 6, 5]]
    same = {"temperature": temperature, "seed": 3, "decoder_start_token_id": 1}
    limit = {"max_new_tokens": 16} if dynamic else {}  # elsewhere the positions are the limit
    with pytest.warns(UserWarning, match="12"):  # the positions end, or the texts are longer than in training
        together, *alone = (checkpoint.generate(ids, **same, **limit) for ids in (rows, *rows))
    assert together == alone
    assert together[1] == together[3]
    hot = {"max_new_tokens": 4, "temperature": 1e6, "decoder_start_token_id": 1}
    random = [checkpoint.generate([token], **hot) for token in (5, 6, 5)]
    assert random[0] == random[2] != random[1], "random draws are a function of the text too"


def test_settings_of_a_broken_checkpoint_have_a_code(tmp_path):
    folder = folder_of("bart", tmp_path / "bart", tokenizer=False)
    for text, code, values in (
        ("[1]", "checkpoint.corrupt", ["generation_config.json"]),
        ('{"eos_token_id": 2}', "model.unsupported", ["decoder_start_token_id"]),
        ('{"bos_token_id": 2, "forced_bos_token_id": 99}', "model.unsupported", [99, 61]),
    ):
        (folder / "generation_config.json").write_text(text)
        with raises(code, *values):
            manyheads.load(folder).generate([5, 6])
    (folder / "generation_config.json").unlink()
    checkpoint = manyheads.load(folder)
    named = checkpoint.generate([5, 6], max_new_tokens=4, decoder_start_token_id=2)
    assert named == checkpoint.generate([5, 6], max_new_tokens=4)
    with pytest.raises(ManyheadsError) as caught:
        checkpoint.generate([5, 6], decoder_start_token_id=2**70)
    assert caught.value.code == "generate.config"
