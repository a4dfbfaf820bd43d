"""What each objective hides, asks and counts: laws over random texts and pictures."""

from __future__ import annotations

import itertools
import json
import math

import kinds
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import manyheads
from manyheads import Inputs, read_model
from manyheads.data.tokens import WordsSpec
from manyheads.objective.language import InfillSpec, MaskedSpec, SpansSpec, missing_part, spans_of
from manyheads.objective.pairs import ContrastiveSpec, Seq2SeqSpec
from manyheads.objective.pooled import ClassifySpec, PatchesSpec
from manyheads.objective.score import NOTHING, Batch, ObjectiveSpec, Tokens
from manyheads.parts.embed import EmbedSpec
from manyheads.spec import SpecError
from manyheads.train.look import evaluate
from manyheads.train.run import made_ready, read_run

SENTINELS = tuple(range(900, 1000))
TOKENS = Tokens(count=1000, extra=SENTINELS)
texts = st.lists(st.lists(st.integers(5, 899), max_size=120).map(np.array), min_size=1, max_size=4)
seeds = st.integers(0, 10_000)


def rows_of(inputs):
    """The real tokens of each row."""
    padding = torch.zeros_like(inputs.tokens, dtype=torch.bool) if inputs.padding is None else inputs.padding
    return [row[~hidden].tolist() for row, hidden in zip(inputs.tokens, padding, strict=True)]


def wanted_of(batch):
    return [row[row != NOTHING].tolist() for row in batch.wanted]


def chance(seed):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------------- masked and smoothed


def test_of_the_places_that_are_asked_most_are_hidden_some_swapped_and_some_kept():
    """80, 10 and 10 in a hundred of them as Devlin et al. 2018 have it, or whatever the fields say."""
    tokens = Tokens(count=100_000)
    text = chance(1).integers(5, tokens.count, 400_000)
    for spec, shares in (
        (MaskedSpec(), (0.15, 0.8, 0.1, 0.1)),
        (MaskedSpec(share=0.3, hidden=0.5, swapped=0.3), (0.3, 0.5, 0.3, 0.2)),
    ):
        batch = spec.batch([(text,)], tokens, chance(2))
        shown, wanted = (one[0, 1:-1].numpy() for one in (batch.inputs.tokens, batch.wanted))
        asked = wanted != NOTHING
        assert (shown[~asked] == text[~asked]).all()
        assert (wanted[asked] == text[asked]).all()
        hidden, kept = (shown == tokens.mask)[asked].mean(), (shown == text)[asked].mean()
        found = asked.mean(), hidden, 1 - hidden - kept, kept
        assert found == pytest.approx(shares, abs=0.01)  # of 60,000 places at least: six standard deviations
        swapped = shown[asked & (shown != text) & (shown != tokens.mask)]
        assert swapped.min() >= 5  # no special token
        assert swapped.mean() == pytest.approx(tokens.count / 2, rel=0.03)


@torch.no_grad()
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_a_smoothed_score_is_its_formula(smoothing):
    """(1 − ε)·nll + ε·the mean over all tokens of −log p."""
    rows = [(np.arange(5, 5 + i), np.arange(8, 8 + i)) for i in range(1, 6)]
    model, spec = kinds.made(kinds.pair()), Seq2SeqSpec(smoothing=smoothing)
    batch = spec.batch(rows, Tokens(count=kinds.VOCAB), chance(0))
    asked = batch.wanted != NOTHING
    logs_NV = model(batch.inputs, batch.source)[asked].log_softmax(-1)
    nll = -logs_NV.gather(1, batch.wanted[asked][:, None]).sum()
    expected = (1 - smoothing) * nll - smoothing * logs_NV.mean(-1).sum()
    assert float(spec.score(model, batch).total) == pytest.approx(float(expected), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- spans


@given(length=st.integers(0, 2000), share=st.floats(0.01, 0.99), mean=st.floats(1, 20), seed=seeds)
def test_spans_hide_exactly_their_share_and_never_touch(length, share, mean, seed):
    spans = spans_of(length, share, mean, chance(seed))
    hidden = max(1, min(round(share * length), length - 1)) if length else 0
    assert sum(stop - start for start, stop in spans) == hidden
    assert len(spans) == (max(1, min(round(hidden / mean), length - hidden + 1)) if length else 0)
    assert all(start < stop for start, stop in spans)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= length)


def test_spans_stand_anywhere_and_neither_end_is_preferred():
    found, generator = np.zeros(20), chance(0)
    for _ in range(3000):
        for start, stop in spans_of(20, 0.25, 2.5, generator):
            found[start:stop] += 1
    assert found.min() > 100
    assert found[:10].sum() == pytest.approx(found[10:].sum(), rel=0.05)


@given(rows=texts, seed=seeds)
def test_source_and_target_of_spans_give_the_text_back(rows, seed):
    batch = SpansSpec().batch([(text,) for text in rows], TOKENS, chance(seed))
    everything = zip(rows, rows_of(batch.source), rows_of(batch.inputs), wanted_of(batch), strict=True)
    for text, source, given_, wanted in everything:
        assert source[-1] == TOKENS.end
        assert (given_[0], given_[1:]) == (TOKENS.begin, wanted[:-1])
        assert wanted[-1] == TOKENS.end
        marks = [token for token in source if token in SENTINELS]
        assert marks == list(SENTINELS[: len(marks)])
        assert wanted[-2] == SENTINELS[len(marks)]  # the last one for the end
        told = wanted[:-1]
        starts = [told.index(mark) for mark in (*marks, wanted[-2])]
        spans = {mark: told[start + 1 : stop] for mark, start, stop in zip(marks, starts, starts[1:], strict=False)}
        again = [token for shown in source[:-1] for token in spans.get(shown, [shown])]
        assert again == text.tolist()


@given(rows=texts, share=st.floats(0.01, 0.99), mean=st.floats(1, 9), seed=seeds)
def test_how_long_spans_and_what_is_shown_become_is_known_before(rows, share, mean, seed):
    spec = SpansSpec(share=share, mean=mean)
    batch = spec.batch([(text,) for text in rows], TOKENS, chance(seed))
    found = [[len(source), len(target)] for source, target in zip(rows_of(batch.source), rows_of(batch.inputs), strict=True)]
    assert spec.length([np.array([len(text) for text in rows])]).tolist() == found


@pytest.mark.parametrize("around", [((), ()), ((801,), ()), ((), (2,)), ((801,), (802,)), None])
def test_spans_are_framed_and_begun_as_any_pair_is(around):
    """As texts are by the tokenizer, and with what begins an answer where that is not what begins a text."""
    tokens = Tokens(count=1000, extra=SENTINELS, around=around, start=803)
    batch = SpansSpec().batch([(np.arange(10, 30),)], tokens, chance(0))
    source, wanted = batch.source.tokens[0], batch.wanted[0]
    shown, hidden = (np.array([token for token in one.tolist() if token in {*range(10, 30), *SENTINELS}]) for one in (source, wanted))
    again = Seq2SeqSpec().batch([(shown, hidden)], tokens, chance(0))
    for one, other in ((source, again.source.tokens[0]), (wanted, again.wanted[0]), (batch.inputs.tokens, again.inputs.tokens)):
        assert torch.equal(one, other)


def test_a_text_with_more_spans_than_sentinels_is_refused():
    with pytest.raises(ValueError, match="a text of 900 tokens has 45 hidden spans, and there are 10 sentinels for them and the end"):
        SpansSpec().batch([(np.full(900, 7),)], Tokens(count=1000, extra=SENTINELS[:10]), chance(0))


def a_run(objective, data=None, head=None, /, **more):
    """A small run of an objective."""
    shape = {
        "spans": {"encoder": kinds.tower(), "decoder": {"like": "encoder", "cross": True, "embed": "shared"}},
        "infill": {"decoder": kinds.tower()},
        "masked": {"encoder": kinds.tower(), "head": "masked"},
        "contrastive": {"encoder": kinds.tower(position="sinusoidal"), "head": "none"},
        "classify": {
            "encoder": kinds.tower(embed={"kind": "patches", "pixels": 4, "channels": 1}),
            "head": {"kind": "classes", "classes": 10},
        },
        "patches": {
            "encoder": kinds.tower(embed={"kind": "patches", "pixels": 4, "channels": 1}, position="sinusoidal"),
            "decoder": kinds.tower(embed="restored", mask={"causal": False}, position="sinusoidal"),
            "head": {"kind": "pixels", "pixels": 4},
        },
    }[objective]
    tokens = {} if objective in ("classify", "patches") else {"vocab": "tokenizer"}
    usual = "digits" if objective in ("classify", "patches") else {"kind": "biographies", "people": 20}
    tree = {"model": tokens | shape | ({"head": head} if head else {}), "data": data or usual, "objective": objective}
    return tree | {"train": {"evaluate_rows": 40}} | more


def test_a_tokenizer_that_is_trained_gets_the_sentinels(tmp_path):
    ready = made_ready(read_run(a_run("spans", objective={"kind": "spans", "sentinels": 12})))
    assert [ready.tokenizer.id_to_token(i) for i in ready.tokens.extra] == [f"<extra_{i}>" for i in range(12)]
    assert ready.spec.vocab == ready.tokens.count == max(ready.tokens.extra) + 1
    assert len(ready.tokenizer.encode("was born <extra_0>", add_special_tokens=False).ids) > 3  # a text that says so remains a text
    assert not set(np.concatenate([row[0] for row in ready.rows.rows]).tolist()) & set(ready.tokens.extra)


@pytest.mark.parametrize("spelt", ["<extra_{}>", "<extra_id_{}>", None])
def test_a_tokenizer_that_is_given_must_have_sentinels(spelt, tmp_path):
    tokenizer = WordsSpec().make(["he was born in a small town"])
    plain = tokenizer.get_vocab_size()
    if spelt:
        tokenizer.add_special_tokens([spelt.format(i) for i in range(50)])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    run = read_run(a_run("spans", tokenizer={"kind": "file", "path": str(path)}))
    if spelt is None:
        with pytest.raises(SpecError, match="tokenizer: spans needs the tokens <extra_0> or <extra_id_0> and so on, and this one has none"):
            made_ready(run)
        return
    ready = made_ready(run)
    assert ready.tokens.extra == tuple(range(plain, plain + 50))
    assert Tokenizer.from_file(str(path)).to_str() == tokenizer.to_str()


def test_a_given_tokenizer_is_asked_for_its_own_special_tokens(tmp_path):
    """As those of T5 and BERT have them: other names, at other places."""
    from tokenizers import models

    for vocab, expected in (
        ({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, **{f"<extra_id_{i}>": 4 + i for i in range(9)}}, (0, 0, 1)),
        ({"a": 0, "[UNK]": 1, "[PAD]": 2, "[SEP]": 3, "[CLS]": 4, **{f"<extra_{i}>": 5 + i for i in range(9)}}, (2, 4, 3)),
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(Tokenizer(models.WordLevel(vocab, unk_token="[UNK]" if "[UNK]" in vocab else "<unk>")).to_str())
        ready = made_ready(read_run(a_run("spans", tokenizer={"kind": "file", "path": str(path)})))
        assert (ready.tokens.pad, ready.tokens.begin, ready.tokens.end) == expected


# ---------------------------------------------------------------------------------------------------------- infill


@given(rows=texts, block=st.integers(8, 200), seed=seeds)
def test_infill_moves_a_part_behind_its_text(rows, block, seed):
    objective = InfillSpec(block=block)
    batch = objective.batch([(text,) for text in rows], TOKENS, chance(seed))
    for text, read, wanted in zip(rows, rows_of(batch.inputs), wanted_of(batch), strict=True):
        assert (read[0], read[1:]) == (TOKENS.begin, wanted[:-1])  # x is all but the last, y is shifted; the rest is padding, not asked
        assert wanted[-1] == TOKENS.end
        first, second = (i for i, token in enumerate(wanted) if token == TOKENS.mask)
        prefix, suffix, content = wanted[:first], wanted[first + 1 : second], wanted[second + 1 : -1]
        again = prefix + content + suffix
        assert again == text[: len(again)].tolist()
        assert min(4, len(text)) <= len(again) <= max(4, block * 7 // 8)
        assert len(read) <= objective.length([np.array([len(text)])])[0]
        assert content or len(again) < 4


@pytest.mark.parametrize("length", [4, 5, 7, 30, 112])
def test_a_quarter_is_missing_on_average(length):
    generator = chance(0)
    parts = np.array([missing_part(length, generator) for _ in range(30_000)])
    assert (parts[:, 1] - parts[:, 0]).mean() == pytest.approx(length / 4, rel=0.02)
    assert parts.min() == 0
    assert parts.max() == length


def test_shares_of_what_is_chosen_are_shares_of_one():
    """Found where it is said, not by learning something else."""
    for hidden, swapped in ((0.8, 0.1), (0.0, 1.0), (0.7, 0.3), (0.9, 0.1)):
        read_run(a_run("masked", objective={"kind": "masked", "hidden": hidden, "swapped": swapped}))
    with pytest.raises(SpecError, match=r"objective.swapped: is 0.5, and 0.8 are hidden already: together they are at most 1"):
        read_run(a_run("masked", objective={"kind": "masked", "hidden": 0.8, "swapped": 0.5}))


# ----------------------------------------------------------------------------------------------------- contrastive


def encoder(head="none"):
    return kinds.made(
        read_model({"vocab": 40, "encoder": kinds.tower(position="sinusoidal"), "head": head, "init": {"kind": "normal", "std": 0.3}})
    )


def some_pairs(count=6, seed=0):
    generator = chance(seed)
    return [tuple(generator.integers(5, 40, size) for size in generator.integers(1, 9, 2)) for _ in range(count)]


def literal(model, rows, temperature, right):
    """−log of a query's own document's share, among those that are wrong and itself; texts one by one."""
    framed = [[torch.tensor([[TOKENS.begin, *text, TOKENS.end]]) for text in row] for row in rows]
    q, d = (torch.stack([model(row[i]).mean(1)[0] for row in framed]) for i in (0, 1))
    scores = torch.cosine_similarity(q[:, None], d[None], dim=-1) / temperature
    kept = [[j for j in range(len(rows)) if j == i or not right(rows[i], rows[j])] for i in range(len(rows))]
    return sum(torch.logsumexp(scores[i, kept[i]], 0) - scores[i, i] for i in range(len(rows)))


def same(one, other):
    return any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_contrastive_is_its_formula_and_the_mean_of_real_tokens():
    model, rows = encoder(), some_pairs()
    rows += [(rows[0][0], some_pairs(seed=5)[0][1]), (some_pairs(seed=6)[0][0], rows[1][1])]  # a query twice, a document twice
    objective = ContrastiveSpec(temperature=0.3)
    score = objective.score(model, objective.batch(rows, TOKENS, chance(0)))
    total = literal(model, rows, 0.3, same)
    assert score.count == len(rows)
    torch.testing.assert_close(score.total.double(), total, atol=1e-4, rtol=0)
    assert total < literal(model, rows, 0.3, lambda *_: False)  # which the twins would have pushed apart
    turned = [(document, query) for query, document in rows]
    both = ContrastiveSpec(temperature=0.3, symmetric=True)
    found = both.score(model, both.batch(rows, TOKENS, chance(0))).total.double()
    torch.testing.assert_close(found, (total + literal(model, turned, 0.3, same)) / 2, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_vector_head_and_none_learn_the_same():
    rows, objective = some_pairs(), ContrastiveSpec()
    plain, headed = encoder(), encoder({"kind": "vector", "pool": "mean"})
    headed.load_state_dict(plain.state_dict())
    batch = objective.batch(rows, TOKENS, chance(0))
    torch.testing.assert_close(objective.score(plain, batch).total, objective.score(headed, batch).total)


@torch.no_grad()
def test_a_query_that_is_its_document_finds_it():
    rows = [(query, query) for query, _ in some_pairs(12)]
    objective = ContrastiveSpec()
    assert objective.score(encoder(), objective.batch(rows, TOKENS, chance(0))).right == 12


# --------------------------------------------------------------------------------------------------------- patches


def autoencoder():
    return kinds.made(read_model(a_run("patches")["model"] | {"init": {"kind": "normal", "std": 0.3}}))


def some_pictures(count=3, length=16):
    return [(np.random.default_rng(i).random((length, 4)),) for i in range(count)]


@given(length=st.integers(2, 40), share=st.floats(0.05, 0.95), seed=seeds)
def test_patches_are_shown_where_they_stand_and_the_rest_is_asked(length, share, seed):
    rows = some_pictures(3, length)
    batch = PatchesSpec(share=share).batch(rows, TOKENS, chance(seed))
    shown = batch.source.positions
    count = max(1, min(round(length * (1 - share)), length - 1))
    assert shown.shape == (3, count)
    for (patches,), places, seen, wanted in zip(rows, shown, batch.source.tokens, batch.wanted, strict=True):
        assert len(set(places.tolist())) == count
        assert np.array_equal(patches[places.numpy()], seen)
        assert set((wanted == NOTHING).nonzero().flatten().tolist()) == set(places.tolist())


@torch.no_grad()
def test_what_is_hidden_is_not_read_and_the_loss_is_its_error():
    model, objective = autoencoder(), PatchesSpec()
    batch = objective.batch(some_pictures(), TOKENS, chance(1))
    hidden = batch.wanted != NOTHING
    restored = model(batch.inputs, batch.source)
    score = objective.score(model, batch)
    assert score.count == int(hidden.sum()) == 3 * 12
    assert score.right is None
    errors = [(restored[b, i] - batch.inputs.tokens[b, i]).square().mean() for b, i in hidden.nonzero().tolist()]
    torch.testing.assert_close(score.total, sum(errors))
    changed = torch.where(hidden[..., None], 9.0, batch.inputs.tokens)
    torch.testing.assert_close(model(Inputs(changed), batch.source), restored)
    assert objective.score(model, Batch(Inputs(changed), batch.wanted, batch.source)).total > score.total


@torch.no_grad()
@pytest.mark.parametrize("normalised", [False, True])
def test_restored_pictures_keep_what_was_shown_and_err_as_the_loss_says(normalised):
    model, objective = autoencoder(), PatchesSpec(normalised=normalised)
    batch = objective.batch(some_pictures(), TOKENS, chance(1))
    hidden, whole = batch.wanted != NOTHING, batch.inputs.tokens
    restored = objective.restored(model, batch)
    assert torch.equal(restored[~hidden], whole[~hidden])
    errors = (restored - whole)[hidden].square().mean(-1) / ((whole[hidden].var(-1) + 1e-6) if normalised else 1)
    torch.testing.assert_close(errors.sum(), objective.score(model, batch).total)


@given(side=st.integers(1, 3), channels=st.integers(1, 3), down=st.integers(1, 4), across=st.integers(1, 4))
def test_patches_are_joined_into_the_pictures_that_were_cut(side, channels, down, across):
    embed = EmbedSpec.choose({"kind": "patches", "pixels": side * side * channels, "channels": channels})
    pictures = torch.rand(2, channels, down * side, across * side)
    assert torch.equal(embed.joined(embed.cut(pictures), *pictures.shape[2:]), pictures)


# ------------------------------------------------------------------------------------------------ runs of all of them

REFUSED = {
    "model.head: contrastive compares vectors, and the head 'tied' gives none": a_run("contrastive", None, "tied"),
    "model.head: classify asks for a class, and the head 'none' gives none": a_run("classify", None, "none"),
    "model.head: says 9 pixels of a patch, and a patch has 4": a_run("patches", None, {"kind": "pixels", "pixels": 9}),
    "model.head: infill asks for tokens, and the head 'vector' scores none": a_run("infill", None, "vector"),
    "contrastive needs query, and biographies gives text": a_run("contrastive"),
    "objective: patches needs picture, and biographies gives text": a_run("patches", "biographies"),
    "model: reads tokens, and the data gives pictures": a_run("classify")
    | {"model": {"vocab": 9, "encoder": kinds.tower(), "head": {"kind": "classes", "classes": 10}}},
    "model.vocab: is 'tokenizer', and there are no texts here": a_run("patches") | {"model": {"vocab": "tokenizer", **a_run("patches")["model"]}},
    "model.encoder.embed.pixels: only square patches are cut": a_run("classify")
    | {"model": {"encoder": kinds.tower(embed={"kind": "patches", "pixels": 6, "channels": 1}), "head": {"kind": "classes", "classes": 10}}},
    "pictures of 8 × 8 points of 1 numbers cannot be cut into patches of 3 × 3": a_run("classify")
    | {"model": {"encoder": kinds.tower(embed={"kind": "patches", "pixels": 9, "channels": 1}), "head": {"kind": "classes", "classes": 10}}},
    "model.decoder.embed": a_run("patches")
    | {"model": a_run("patches")["model"] | {"decoder": kinds.tower(embed={"kind": "patches", "pixels": 4, "channels": 1}, cross=True)}},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(sentence):
    with pytest.raises(SpecError) as found:
        made_ready(read_run(REFUSED[sentence]))
    assert sentence in str(found.value)


@pytest.mark.parametrize("objective", ["spans", "infill", "contrastive", "classify", "patches"])
def test_unseen_rows_are_scored(objective):
    data = {"kind": "sequence", "count": 50} if objective == "contrastive" else None
    ready = made_ready(read_run(a_run(objective, data)))
    metrics = evaluate(manyheads.build(ready.spec), ready)
    assert set(metrics) == ({"loss"} if objective == "patches" else {"loss", "accuracy"})
    assert all(math.isfinite(value) for value in metrics.values())
    assert json.dumps(metrics) == json.dumps(evaluate(manyheads.build(ready.spec), ready))


def test_every_objective_says_what_it_is():
    for kind, spec in ObjectiveSpec.kinds.items():
        assert spec.formula() != "no formula given", kind
        assert set(spec.shapes) <= {"encoder", "decoder", "encoder–decoder", "recurrent", "ngram"}
        assert all(field.description for field in spec.model_fields.values()), kind


def test_a_picture_is_classified_from_its_patches():
    rows = [(np.ones((16, 4), np.float32) * i, np.array([i])) for i in range(3)]
    batch = ClassifySpec().batch(rows, TOKENS, chance(0))
    assert batch.inputs.tokens.shape == (3, 16, 4)
    assert batch.wanted.tolist() == [0, 1, 2]
    assert batch.tokens == 3 * 16
