"""Writing: search against all texts there are and against transformers, batches against single texts, and the rules of a checkpoint."""

from __future__ import annotations

import itertools

import pytest
import torch
from kinds import VOCAB, decoder, made, ngram, padded, pair, recurrent, tokens
from test_families import CASES, make, moved

import manyheads
from manyheads import Inputs
from manyheads.checkpoint import Loaded
from manyheads.generate import search as searching
from manyheads.generate.sample import Rules, sample
from manyheads.generate.search import search

SHAPES = {
    "decoder": decoder(),
    "windowed": decoder(mask={"causal": True, "window": 3}, position="rope"),
    "pair": pair(position="sinusoidal"),
    "recurrent": recurrent(),
    "recurrent-language": recurrent(source=False),
    "ngram": ngram(),
}
STOP = Rules(stop=(2,))


def sourced(name):
    return name in ("pair", "recurrent")


def asked(name, batch=3, length=4):
    """A prompt and a source, if the shape has one."""
    return (torch.ones(batch, 1, dtype=torch.long), tokens(batch, length)) if sourced(name) else (tokens(batch, length), None)


def likelihood(model, prompt, source, text):
    """log p(text), by one forward over the whole."""
    whole = torch.cat((prompt, torch.tensor([text])), dim=1)
    logits = model(whole) if source is None else model(whole, source)
    chances = logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    return float(chances[torch.arange(len(text)), torch.tensor(text)].sum())


def every_text(vocab, longest, stop):
    """All texts that end in a stop, or are cut off."""
    inside = [token for token in range(vocab) if token not in stop]
    for length in range(1, longest + 1):
        last = range(vocab) if length == longest else stop
        yield from ([*before, end] for before in itertools.product(inside, repeat=length - 1) for end in last)


def small(name, vocab=4):
    return made(manyheads.read_model(manyheads.spec.to_tree(SHAPES[name]) | {"vocab": vocab}), seed=5)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("stop", [(2,), (2, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_with_beams_for_all_the_best_of_all_texts_is_found(name, stop, penalty):
    model, (prompt, source) = small(name), asked(name)
    prompt, source = prompt % 4, None if source is None else source % 4
    found = search(model, prompt, source, beams=4**4, penalty=penalty, max_new=4, rules=Rules(stop=stop))
    for i, row in enumerate(found):
        own = prompt[i : i + 1], None if source is None else source[i : i + 1]
        scores = {tuple(text): likelihood(model, *own, text) / ((5 + len(text)) / 6) ** penalty for text in every_text(4, 4, stop)}
        assert tuple(row) == max(scores, key=scores.get)


def test_more_beams_are_better_in_sum():
    """Not for every text, and for most: the score of what is found grows with the beams."""
    model, prompt = made(decoder()), tokens(16, 3)
    sums = []
    for beams in (1, 2, 4, 16):
        found = search(model, prompt, beams=beams, penalty=0.0, max_new=6, rules=STOP)
        sums.append(sum(likelihood(model, prompt[i : i + 1], None, text) for i, text in enumerate(found)))
    assert sums == sorted(sums)
    assert sums[0] < sums[-1]


def cut(rows, stop=(2,)):
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def greedy(model, prompt, source, rules=STOP, max_new=12):
    return cut(torch.stack(list(sample(model, prompt, source, max_new=max_new, rules=rules)), dim=1).tolist(), rules.stop)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("name", SHAPES)
def test_one_beam_takes_the_likeliest_token(name, penalty):
    model = made(SHAPES[name])
    prompt, source = asked(name, batch=8)
    found = search(model, prompt, source, beams=1, penalty=penalty, max_new=12, rules=STOP)
    assert found == greedy(model, prompt, source)
    assert len({len(row) for row in found}) > 1, "some end before others, or nothing was tried"


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_gives_what_each_text_gives_alone(name, side, beams):
    """Texts of many lengths, padded on either side, that end at many steps and leave the batch."""
    model, counts = made(SHAPES[name]), [6, 1, 4, 2, 5, 3]
    ids = tokens(len(counts), 6)
    batch, begin = padded(ids, counts, side, filler=2), torch.ones(len(counts), 1, dtype=torch.long)
    rules = Rules(stop=(2, 7), never=((5,), (9, 4), (3, 3)))

    def written(prompt, source):
        if beams == 1:
            return greedy(model, prompt, source, rules)
        return search(model, prompt, source, beams=beams, max_new=12, rules=rules)

    together = written(begin, batch) if sourced(name) else written(batch, None)
    alone = [ids[i : i + 1, :count] for i, count in enumerate(counts)]
    assert together == [written(begin[:1], one)[0] if sourced(name) else written(one, None)[0] for one in alone]
    assert len({len(row) for row in together}) > 1


def test_what_has_ended_is_computed_no_more():
    """Rows leave the batch, of search and of sampling alike, and a source is encoded once."""
    model, prompt, source = made(pair()), torch.ones(8, 1, dtype=torch.long), tokens(8, 5)
    seen, encoded = [], []
    model.decoder.register_forward_hook(lambda module, given, made: seen.append(len(given[0].tokens)))
    model.encoder.register_forward_hook(lambda module, given, made: encoded.append(len(given[0].tokens)))
    found = search(model, prompt, source, beams=3, max_new=20, rules=STOP)
    assert seen[:2] == [8, 24], "a prompt is read once, whatever the number of beams"
    assert seen == sorted(seen[:1]) + sorted(seen[1:], reverse=True)
    assert seen[-1] < 24
    assert encoded == [8]
    seen.clear()
    written = greedy(model, prompt, source, max_new=20)
    assert seen == [sum(len(row) > step for row in written) for step in range(max(map(len, written)))]
    assert len(found) == 8


class Scripted:
    """A language model of given probabilities: what follows depends on the length of the text alone."""

    def __init__(self, steps):
        self.steps = torch.tensor(steps).log()

    def start(self, source=None, *, capacity=None):
        return Counted(0)

    def step(self, inputs, state):
        logits = self.steps[min(state.length, len(self.steps) - 1)]
        return logits.expand(inputs.batch, inputs.length, -1), Counted(state.length + 1)


class Counted:
    def __init__(self, length):
        self.length = length

    def select(self, rows):
        return self


def test_a_higher_penalty_gives_longer_texts():
    """Ending is the likeliest at every step, by less and less a token: log p falls, and what is divided by grows."""
    model = Scripted([[0.02, 0.5, 0.48], [0.02, 0.49, 0.49], [0.02, 0.4, 0.58], [0.02, 0.3, 0.68], [0.02, 0.9, 0.08]])
    lengths = []
    for penalty in (0.0, 0.3, 0.6, 1.0, 2.0, 4.0):
        (text,) = search(model, torch.tensor([[0]]), beams=2, penalty=penalty, max_new=8, rules=Rules(stop=(1,)))
        lengths.append(len(text))
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] > 3


def test_a_search_ends_when_nothing_can_be_better():
    model = Scripted([[0.01, 0.98, 0.01]])
    steps = []
    take = model.step
    model.step = lambda inputs, state: steps.append(inputs.batch) or take(inputs, state)
    assert search(model, torch.tensor([[0]]), beams=4, penalty=0.0, max_new=50, rules=Rules(stop=(1,))) == [[1]]
    assert len(steps) == 1, "0.01 is less than 0.98 already"
    steps.clear()
    search(model, torch.tensor([[0]]), beams=4, penalty=5.0, max_new=50, rules=Rules(stop=(1,)))
    assert 1 < len(steps) < 10, "four have ended"


@pytest.mark.parametrize("beams", [1, 4])
def test_the_rules_hold(beams):
    """First and last tokens that must be, tokens and pairs that must not; nothing follows the token that ends a text."""
    model, (prompt, source) = made(pair()), asked("pair", batch=6)
    rules = Rules(stop=(2, 3), first=(9,), last=(2,), never=((4,), (5,), (9, 6), (7, 7)))
    written = search(model, prompt, source, beams=beams, max_new=6, rules=rules)
    for row in written:
        assert row[0] == 9
        assert len(row) < 6 or row[-1] == 2
        assert not {4, 5} & set(row)
        assert not {(9, 6), (7, 7)} & set(itertools.pairwise(row))
        assert not {2, 3} & set(row[:-1])
    with pytest.raises(ValueError, match=f"token {VOCAB} must be written, and is not in the vocabulary of {VOCAB}"):
        search(model, prompt, source, beams=beams, rules=Rules(first=(VOCAB,)))


def test_a_first_token_is_for_texts_of_one_token_whoever_stands_beside():
    model, rules = made(decoder()), Rules(first=(9,))
    batch = Inputs(torch.tensor([[0, 0, 5], [6, 7, 8]]), padding=torch.tensor([[True, True, False], [False] * 3]))
    one, other = greedy(model, batch, None, rules, max_new=3)
    assert one == greedy(model, torch.tensor([[5]]), None, rules, max_new=3)[0]
    assert other == greedy(model, torch.tensor([[6, 7, 8]]), None, rules, max_new=3)[0]
    assert one[0] == 9


# ------------------------------------------------------------------------------------------------ against transformers


@pytest.mark.parametrize("said", [{}, {"forced_bos_token_id": 9, "forced_eos_token_id": 2}, {"bad_words_ids": [[5], [7, 8]]}])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "gpt2", "llama"])
def test_four_beams_find_what_the_reference_finds(name, penalty, said, monkeypatch, tmp_path):
    """With its length penalty, n^α, in place of ours; it stops when as many texts have ended as there are beams."""
    import json

    torch.manual_seed(1)
    found, config, more = CASES[name]
    theirs = moved(make(found, config, **more)).eval()
    theirs.save_pretrained(tmp_path / name)
    rules = {"eos_token_id": [2, 11], "decoder_start_token_id": 3, "pad_token_id": 60, "bos_token_id": 1} | said
    (tmp_path / name / "generation_config.json").write_text(json.dumps(rules))
    theirs.generation_config = type(theirs.generation_config)(**rules)
    monkeypatch.setattr(searching, "lengthened", lambda length, penalty: float(length**penalty))
    ours, whole = manyheads.load(tmp_path / name), theirs.config.is_encoder_decoder
    for ids in ([5], [5, 9, 7], [8, 20, 31, 44]):
        how = {"num_beams": 4, "length_penalty": penalty, "early_stopping": True, "do_sample": False, "max_new_tokens": 9}
        row = theirs.generate(torch.tensor([ids]), **how)[0, 1 if whole else len(ids) :].tolist()
        assert ours.generate(ids, beams=4, penalty=penalty, max_new=9) == [
            token for token in cut([row], (2, 11))[0] if token not in (2, 11)
        ]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", ["decoder", "pair"])
def test_something_loaded_answers_each_text_as_if_alone(name, temperature):
    """Places that run out at different lengths, angles that depend on the length, and chance are each text's own."""
    learned = {"kind": "learned", "length": 12}
    spec = pair(position=learned) if name == "pair" else decoder(position=learned)
    rows = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [6, 7], [5], [9, 8, 7, 6, 5]]
    dynamic = decoder(position={"kind": "rope", "scaling": {"kind": "dynamic", "factor": 3.0, "length": 4}})
    for one in (spec, dynamic):
        ours = Loaded(made(one))
        how = {"max_new": 9, "temperature": temperature, "seed": 3, "start": 1}
        together = dict(ours.write(rows, manyheads.generate.sample.Writing(**how)))
        assert [together[i] for i in range(len(rows))] == [ours.generate(row, **how) for row in rows]
        assert together[1] == together[3]
