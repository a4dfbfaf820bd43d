"""What each task masks, predicts and counts: invariants over random texts and images, and the models and data that fit it."""

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
from raising import raises
from tokenizers import Tokenizer, models

import manyheads
from manyheads import Inputs, read_model
from manyheads.data.tokenizer import WordsSpec
from manyheads.parts.embed import EmbedSpec
from manyheads.tasks.batch import IGNORE_INDEX, Batch, SpecialTokens
from manyheads.tasks.classify import ClassifySpec
from manyheads.tasks.images import MaeSpec
from manyheads.tasks.language import InfillSpec, MaskedSpec, SpansSpec, draw_gap, draw_spans
from manyheads.tasks.retrieval import RetrievalSpec
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.tasks.task import TaskSpec
from manyheads.training.loop import validate
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

SENTINELS = tuple(range(900, 1000))
TOKENS = SpecialTokens(vocab_size=1000, sentinels=SENTINELS)
texts = st.lists(st.lists(st.integers(5, 899), max_size=120).map(np.array), min_size=1, max_size=4)
seeds = st.integers(0, 10_000)


def rows_of(inputs):
    """The tokens of each row without padding."""
    padding_mask = (
        torch.zeros_like(inputs.tokens, dtype=torch.bool) if inputs.padding_mask is None else inputs.padding_mask
    )
    return [row[~mask].tolist() for row, mask in zip(inputs.tokens, padding_mask, strict=True)]


def targets_of(batch):
    return [row[row != IGNORE_INDEX].tolist() for row in batch.targets]


def rng(seed):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------------- masked and smoothed


def test_of_the_predicted_positions_most_are_masked_some_random_and_some_unchanged():
    """80, 10 and 10 per cent of them in Devlin et al. 2018, or as the fields say."""
    special_tokens = SpecialTokens(vocab_size=100_000)
    text = rng(1).integers(5, special_tokens.vocab_size, 400_000)
    for spec, expected in (
        (MaskedSpec(), (0.15, 0.8, 0.1, 0.1)),
        (MaskedSpec(mlm_probability=0.3, mask_replace_prob=0.5, random_replace_prob=0.3), (0.3, 0.5, 0.3, 0.2)),
    ):
        batch = spec.batch([(text,)], special_tokens, rng(2))
        inputs, targets = (item[0, 1:-1].numpy() for item in (batch.inputs.tokens, batch.targets))
        mask = targets != IGNORE_INDEX
        assert (inputs[~mask] == text[~mask]).all()
        assert (targets[mask] == text[mask]).all()
        masked, unchanged = (inputs == special_tokens.mask)[mask].mean(), (inputs == text)[mask].mean()
        shares = mask.mean(), masked, 1 - masked - unchanged, unchanged
        assert shares == pytest.approx(expected, abs=0.01)  # of at least 60,000 positions: six standard deviations
        random = inputs[mask & (inputs != text) & (inputs != special_tokens.mask)]
        assert random.min() >= 5  # no special token
        assert random.mean() == pytest.approx(special_tokens.vocab_size / 2, rel=0.03)


def test_the_shares_of_masked_and_random_tokens_sum_to_at_most_one():
    for masked, random in ((0.8, 0.1), (0.0, 1.0), (0.7, 0.3), (0.9, 0.1)):
        read_run(
            small_run("masked", task={"kind": "masked", "mask_replace_prob": masked, "random_replace_prob": random})
        )
    with raises("config.out-of-range", "task.random_replace_prob", 0.5, 0.2):
        read_run(small_run("masked", task={"kind": "masked", "mask_replace_prob": 0.8, "random_replace_prob": 0.5}))


@torch.no_grad()
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_a_smoothed_loss_is_its_formula(smoothing):
    """(1 − ε)·nll + ε·the mean over all tokens of −log p."""
    rows = [(np.arange(5, 5 + i), np.arange(8, 8 + i)) for i in range(1, 6)]
    model, task = kinds.random_model(kinds.pair()), Seq2SeqSpec(label_smoothing=smoothing)
    batch = task.batch(rows, SpecialTokens(vocab_size=kinds.VOCAB), rng(0))
    mask = batch.targets != IGNORE_INDEX
    logs_NV = model(batch.inputs, batch.source)[mask].log_softmax(-1)
    nll = -logs_NV.gather(1, batch.targets[mask][:, None]).sum()
    expected = (1 - smoothing) * nll - smoothing * logs_NV.mean(-1).sum()
    assert float(task.loss(model.train(), batch).sum) == pytest.approx(float(expected), rel=1e-5)
    assert float(task.loss(model.eval(), batch).sum) == pytest.approx(float(nll), rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- spans


@given(length=st.integers(0, 2000), share=st.floats(0.01, 0.99), mean=st.floats(1, 20), seed=seeds)
def test_spans_mask_exactly_their_share_and_never_touch(length, share, mean, seed):
    spans = draw_spans(length, share, mean, rng(seed))
    masked = max(1, min(round(share * length), length - 1)) if length else 0
    assert sum(stop - start for start, stop in spans) == masked
    assert len(spans) == (max(1, min(round(masked / mean), length - masked + 1)) if length else 0)
    assert all(start < stop for start, stop in spans)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= length)


def test_spans_stand_anywhere_and_neither_end_is_preferred():
    counts, generator = np.zeros(20), rng(0)
    for _ in range(3000):
        for start, stop in draw_spans(20, 0.25, 2.5, generator):
            counts[start:stop] += 1
    assert counts.min() > 100
    assert counts[:10].sum() == pytest.approx(counts[10:].sum(), rel=0.05)


@given(rows=texts, seed=seeds)
def test_the_source_and_the_target_of_spans_give_the_text_back(rows, seed):
    batch = SpansSpec().batch([(text,) for text in rows], TOKENS, rng(seed))
    columns = zip(rows, rows_of(batch.source), rows_of(batch.inputs), targets_of(batch), strict=True)
    for text, source, inputs, targets in columns:
        assert source[-1] == TOKENS.eos
        assert (inputs[0], inputs[1:]) == (TOKENS.bos, targets[:-1])
        assert targets[-1] == TOKENS.eos
        sentinels = [token for token in source if token in SENTINELS]
        assert sentinels == list(SENTINELS[: len(sentinels)])
        assert targets[-2] == SENTINELS[len(sentinels)]  # the last one for the end
        starts = [targets.index(sentinel) for sentinel in (*sentinels, targets[-2])]
        spans = {
            sentinel: targets[start + 1 : stop]
            for sentinel, start, stop in zip(sentinels, starts, starts[1:], strict=False)
        }
        restored = [token for visible in source[:-1] for token in spans.get(visible, [visible])]
        assert restored == text.tolist()


@given(rows=texts, share=st.floats(0.01, 0.99), mean=st.floats(1, 9), seed=seeds)
def test_the_lengths_of_source_and_target_are_known_before_spans_are_drawn(rows, share, mean, seed):
    task = SpansSpec(noise_density=share, mean_span_length=mean)
    batch = task.batch([(text,) for text in rows], TOKENS, rng(seed))
    pairs = zip(rows_of(batch.source), rows_of(batch.inputs), strict=True)
    lengths = [[len(source), len(target)] for source, target in pairs]
    assert task.lengths([np.array([len(text) for text in rows])]).tolist() == lengths


@pytest.mark.parametrize("template", [((), ()), ((801,), ()), ((), (2,)), ((801,), (802,)), None])
def test_spans_get_the_special_tokens_of_any_pair(template):
    """Those of the tokenizer, and a decoder's start token that is not the one that begins a text."""
    tokens = SpecialTokens(vocab_size=1000, sentinels=SENTINELS, prefix_suffix_ids=template, decoder_start_token_id=803)
    batch = SpansSpec().batch([(np.arange(10, 30),)], tokens, rng(0))
    source, targets = batch.source.tokens[0], batch.targets[0]
    visible, masked = (
        np.array([token for token in item.tolist() if token in {*range(10, 30), *SENTINELS}])
        for item in (source, targets)
    )
    pair = Seq2SeqSpec().batch([(visible, masked)], tokens, rng(0))
    for item, other in (
        (source, pair.source.tokens[0]),
        (targets, pair.targets[0]),
        (batch.inputs.tokens, pair.inputs.tokens),
    ):
        assert torch.equal(item, other)


def test_a_text_with_more_spans_than_sentinels_is_refused():
    with raises("data.tokenizer", 900, 45, 10, "task.num_sentinels"):
        tokens = SpecialTokens(vocab_size=1000, sentinels=SENTINELS[:10])
        SpansSpec().batch([(np.full(900, 7),)], tokens, rng(0))


def small_run(task_kind, data=None, head=None, /, **more):
    """A small run of a task."""
    shape = {
        "spans": {"encoder": kinds.stack(), "decoder": {"like": "encoder", "cross": True, "embed": "shared"}},
        "infill": {"decoder": kinds.stack()},
        "masked": {"encoder": kinds.stack(), "head": "masked"},
        "retrieval": {"encoder": kinds.stack(position="sinusoidal"), "head": "none"},
        "classify": {
            "encoder": kinds.stack(embed={"kind": "patches", "pixels": 4, "channels": 1}),
            "head": {"kind": "classes", "classes": 10},
        },
        "mae": {
            "encoder": kinds.stack(embed={"kind": "patches", "pixels": 4, "channels": 1}, position="sinusoidal"),
            "decoder": kinds.stack(embed="mask-tokens", mask={"causal": False}, position="sinusoidal"),
            "head": {"kind": "pixels", "pixels": 4},
        },
    }[task_kind]
    images = task_kind in ("classify", "mae")
    usual = "digits" if images else {"kind": "biographies", "people": 20}
    model = ({} if images else {"vocab": "tokenizer"}) | shape | ({"head": head} if head else {})
    return {"model": model, "data": data or usual, "task": task_kind, "train": {"eval_rows": 40}} | more


def test_a_tokenizer_trained_here_gets_the_sentinels():
    run = prepare(read_run(small_run("spans", task={"kind": "spans", "num_sentinels": 12})))
    assert [run.tokenizer.id_to_token(i) for i in run.special_tokens.sentinels] == [f"<extra_{i}>" for i in range(12)]
    assert run.model_spec.vocab == run.special_tokens.vocab_size == max(run.special_tokens.sentinels) + 1
    # the name of a sentinel in a text is text
    assert len(run.tokenizer.encode("was born <extra_0>", add_special_tokens=False).ids) > 3
    assert not set(np.concatenate([row[0] for row in run.train_dataset.rows]).tolist()) & set(
        run.special_tokens.sentinels
    )


@pytest.mark.parametrize("spelling", ["<extra_{}>", "<extra_id_{}>", None])
def test_a_tokenizer_from_a_file_must_have_sentinels(spelling, tmp_path):
    tokenizer = WordsSpec().make(["he was born in a small town"])
    size = tokenizer.get_vocab_size()
    if spelling:
        tokenizer.add_special_tokens([spelling.format(i) for i in range(50)])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    spec = read_run(small_run("spans", tokenizer={"kind": "file", "path": str(path)}))
    if spelling is None:
        with raises("config.incompatible", "tokenizer", "<extra_0>", "<extra_id_0>"):
            prepare(spec)
        return
    run = prepare(spec)
    assert run.special_tokens.sentinels == tuple(range(size, size + 50))
    assert Tokenizer.from_file(str(path)).to_str() == tokenizer.to_str()


def test_a_tokenizer_from_a_file_has_its_own_special_tokens(tmp_path):
    """Those of T5 and BERT have other names and other ids."""
    for vocab, expected in (
        ({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, **{f"<extra_id_{i}>": 4 + i for i in range(9)}}, (0, 0, 1)),
        (
            {"a": 0, "[UNK]": 1, "[PAD]": 2, "[SEP]": 3, "[CLS]": 4, **{f"<extra_{i}>": 5 + i for i in range(9)}},
            (2, 4, 3),
        ),
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(Tokenizer(models.WordLevel(vocab, unk_token="[UNK]" if "[UNK]" in vocab else "<unk>")).to_str())
        run = prepare(read_run(small_run("spans", tokenizer={"kind": "file", "path": str(path)})))
        assert (run.special_tokens.pad, run.special_tokens.bos, run.special_tokens.eos) == expected


# -------------------------------------------------------------------------------------------------------------- infill


@given(rows=texts, block=st.integers(8, 200), seed=seeds)
def test_infill_moves_a_part_to_the_end_of_its_text(rows, block, seed):
    task = InfillSpec(block_size=block)
    batch = task.batch([(text,) for text in rows], TOKENS, rng(seed))
    for text, inputs, targets in zip(rows, rows_of(batch.inputs), targets_of(batch), strict=True):
        assert (inputs[0], inputs[1:]) == (TOKENS.bos, targets[:-1])  # shifted by one; padding has no target
        assert targets[-1] == TOKENS.eos
        first, second = (i for i, token in enumerate(targets) if token == TOKENS.mask)
        prefix, suffix, content = targets[:first], targets[first + 1 : second], targets[second + 1 : -1]
        restored = prefix + content + suffix
        assert restored == text[: len(restored)].tolist()
        assert min(4, len(text)) <= len(restored) <= max(4, block * 7 // 8)
        assert len(inputs) <= task.lengths([np.array([len(text)])])[0]
        assert content or len(restored) < 4


@pytest.mark.parametrize("length", [4, 5, 7, 30, 112])
def test_a_quarter_is_missing_on_average(length):
    generator = rng(0)
    gaps = np.array([draw_gap(length, generator) for _ in range(30_000)])
    assert (gaps[:, 1] - gaps[:, 0]).mean() == pytest.approx(length / 4, rel=0.02)
    assert gaps.min() == 0
    assert gaps.max() == length


# ----------------------------------------------------------------------------------------------------------- retrieval


def encoder(head="none"):
    init = {"kind": "normal", "std": 0.3}
    tree = {"vocab": 40, "encoder": kinds.stack(position="sinusoidal"), "head": head, "init": init}
    return kinds.random_model(read_model(tree))


def random_pairs(count=6, seed=0):
    generator = rng(seed)
    return [tuple(generator.integers(5, 40, size) for size in generator.integers(1, 9, 2)) for _ in range(count)]


def retrieval_loss(model, rows, temperature, is_positive):
    """−log of the share of a query's own document among that and the negatives; texts one by one."""
    ids = [[torch.tensor([[TOKENS.bos, *text, TOKENS.eos]]) for text in row] for row in rows]
    q, d = (torch.stack([model(row[i]).mean(1)[0] for row in ids]) for i in (0, 1))
    scores = torch.cosine_similarity(q[:, None], d[None], dim=-1) / temperature
    count = range(len(rows))
    kept = [[j for j in count if j == i or not is_positive(rows[i], rows[j])] for i in count]
    return sum(torch.logsumexp(scores[i, kept[i]], 0) - scores[i, i] for i in count)


def same_query_or_document(one, other):
    return any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_retrieval_is_its_formula_with_the_mean_over_the_tokens():
    model, rows = encoder(), random_pairs()
    # a query twice, a document twice
    rows += [(rows[0][0], random_pairs(seed=5)[0][1]), (random_pairs(seed=6)[0][0], rows[1][1])]
    task = RetrievalSpec(temperature=0.3)
    loss = task.loss(model, task.batch(rows, TOKENS, rng(0)))
    expected = retrieval_loss(model, rows, 0.3, same_query_or_document)
    assert loss.count == len(rows)
    torch.testing.assert_close(loss.sum.double(), expected, atol=1e-4, rtol=0)
    assert expected < retrieval_loss(model, rows, 0.3, lambda *_: False)  # duplicates would be pushed apart
    swapped = [(document, query) for query, document in rows]
    both = RetrievalSpec(temperature=0.3, symmetric=True)
    symmetric = both.loss(model, both.batch(rows, TOKENS, rng(0))).sum.double()
    other = retrieval_loss(model, swapped, 0.3, same_query_or_document)
    torch.testing.assert_close(symmetric, (expected + other) / 2, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_vector_head_and_no_head_have_the_same_loss():
    rows, task = random_pairs(), RetrievalSpec()
    plain, with_head = encoder(), encoder({"kind": "vector", "pool": "mean"})
    with_head.load_state_dict(plain.state_dict())
    batch = task.batch(rows, TOKENS, rng(0))
    torch.testing.assert_close(task.loss(plain, batch).sum, task.loss(with_head, batch).sum)


@torch.no_grad()
def test_a_query_that_equals_its_document_finds_it():
    rows = [(query, query) for query, _ in random_pairs(12)]
    task = RetrievalSpec()
    assert task.loss(encoder(), task.batch(rows, TOKENS, rng(0))).correct == 12


# -------------------------------------------------------------------------------------------------------------- images


def autoencoder():
    return kinds.random_model(read_model(small_run("mae")["model"] | {"init": {"kind": "normal", "std": 0.3}}))


def random_images(count=3, length=16):
    return [(np.random.default_rng(i).random((length, 4)),) for i in range(count)]


@given(length=st.integers(2, 40), share=st.floats(0.05, 0.95), seed=seeds)
def test_visible_patches_keep_their_positions_and_the_others_are_targets(length, share, seed):
    rows = random_images(3, length)
    batch = MaeSpec(mask_ratio=share).batch(rows, TOKENS, rng(seed))
    count = max(1, min(round(length * (1 - share)), length - 1))
    assert batch.source.positions.shape == (3, count)
    columns = zip(rows, batch.source.positions, batch.source.tokens, batch.targets, strict=True)
    for (patches,), positions, visible, targets in columns:
        assert len(set(positions.tolist())) == count
        assert np.array_equal(patches[positions.numpy()], visible)
        assert set((targets == IGNORE_INDEX).nonzero().flatten().tolist()) == set(positions.tolist())


@torch.no_grad()
def test_masked_patches_are_not_read_and_the_loss_is_their_error():
    model, task = autoencoder(), MaeSpec()
    batch = task.batch(random_images(), TOKENS, rng(1))
    masked = batch.targets != IGNORE_INDEX
    restored = model(batch.inputs, batch.source)
    loss = task.loss(model, batch)
    assert loss.count == int(masked.sum()) == 3 * 12
    assert loss.correct is None
    errors = [(restored[b, i] - batch.inputs.tokens[b, i]).square().mean() for b, i in masked.nonzero().tolist()]
    torch.testing.assert_close(loss.sum, sum(errors))
    changed = torch.where(masked[..., None], 9.0, batch.inputs.tokens)
    torch.testing.assert_close(model(Inputs(changed), batch.source), restored)
    assert task.loss(model, Batch(Inputs(changed), batch.targets, batch.source)).sum > loss.sum


@torch.no_grad()
@pytest.mark.parametrize("normalized", [False, True])
def test_restored_images_keep_their_visible_patches_and_have_the_error_of_the_loss(normalized):
    model, task = autoencoder(), MaeSpec(norm_pix_loss=normalized)
    batch = task.batch(random_images(), TOKENS, rng(1))
    masked, whole = batch.targets != IGNORE_INDEX, batch.inputs.tokens
    restored = task.restore(model, batch)
    assert torch.equal(restored[~masked], whole[~masked])
    errors = (restored - whole)[masked].square().mean(-1) / ((whole[masked].var(-1) + 1e-6) if normalized else 1)
    torch.testing.assert_close(errors.sum(), task.loss(model, batch).sum)


@given(side=st.integers(1, 3), channels=st.integers(1, 3), down=st.integers(1, 4), across=st.integers(1, 4))
def test_patches_are_joined_into_the_images_that_were_cut(side, channels, down, across):
    embed = EmbedSpec.from_config({"kind": "patches", "pixels": side * side * channels, "channels": channels})
    images = torch.rand(2, channels, down * side, across * side)
    assert torch.equal(embed.unpatchify(embed.patchify(images), *images.shape[2:]), images)


def test_an_image_is_classified_from_its_patches():
    rows = [(np.ones((16, 4), np.float32) * i, np.array([i])) for i in range(3)]
    batch = ClassifySpec().batch(rows, TOKENS, rng(0))
    assert batch.inputs.tokens.shape == (3, 16, 4)
    assert batch.targets.tolist() == [0, 1, 2]
    assert batch.num_tokens == 3 * 16


# ----------------------------------------------------------------------------------------------- models, data and runs


def patches(pixels, **more):
    return kinds.stack(embed={"kind": "patches", "pixels": pixels, "channels": 1}, **more)


TEN_CLASSES = {"head": {"kind": "classes", "classes": 10}}
WRONG = {
    "a head without vectors": (small_run("retrieval", None, "tied"), ["model.head", "retrieval", "tied"]),
    "a head without classes": (small_run("classify", None, "none"), ["model.head", "classify", "none"]),
    "a head without tokens": (small_run("infill", None, "vector"), ["model.head", "infill", "vector"]),
    "another number of pixels": (small_run("mae", None, {"kind": "pixels", "pixels": 9}), ["model.head", 9, 4]),
    "no queries": (small_run("retrieval"), ["task", "query", "text"]),
    "no images": (small_run("mae", "biographies"), ["task", "image", "text"]),
    "images for tokens": (
        small_run("classify") | {"model": {"vocab": 9, "encoder": kinds.stack()} | TEN_CLASSES},
        ["model"],
    ),
    "a vocabulary without texts": (
        small_run("mae") | {"model": {"vocab": "tokenizer"} | small_run("mae")["model"]},
        ["model.vocab", "tokenizer"],
    ),
    "patches that are not square": (
        small_run("classify") | {"model": {"encoder": patches(6)} | TEN_CLASSES},
        ["model.encoder.embed.pixels"],
    ),
    "patches that do not fit": (
        small_run("classify") | {"model": {"encoder": patches(9)} | TEN_CLASSES},
        ["model.encoder.embed", "8 × 8", "3 × 3"],
    ),
    "a decoder that sees the image": (
        small_run("mae") | {"model": small_run("mae")["model"] | {"decoder": patches(4, cross=True)}},
        ["model.decoder.embed"],
    ),
    "another shape": (small_run("infill") | {"task": "masked"}, ["task", "masked", "encoder", "decoder"]),
    "the variance of one pixel": (
        small_run("mae")
        | {"model": small_run("mae")["model"] | {"encoder": patches(1), "head": {"kind": "pixels", "pixels": 1}}}
        | {"task": {"kind": "mae", "norm_pix_loss": True}},
        ["task.norm_pix_loss"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_its_path(name):
    tree, values = WRONG[name]
    with raises("config.incompatible", *values) as caught:
        prepare(read_run(tree))
    assert ".".join(map(str, caught.value.path)) == values[0]


@pytest.mark.parametrize("kind", ["spans", "infill", "retrieval", "classify", "mae"])
def test_the_validation_set_is_scored(kind):
    data = {"kind": "sequence", "count": 50} if kind == "retrieval" else None
    run = prepare(read_run(small_run(kind, data)))
    metrics = validate(manyheads.build(run.model_spec), run)
    assert set(metrics) == ({"loss"} if kind == "mae" else {"loss", "accuracy"})
    assert all(math.isfinite(value) for value in metrics.values())
    assert json.dumps(metrics) == json.dumps(validate(manyheads.build(run.model_spec), run))


def test_every_task_has_a_formula_shapes_and_described_fields():
    for kind, spec in TaskSpec.kinds.items():
        assert spec.summary() != "no formula given", kind
        assert set(spec.architectures) <= {"encoder", "decoder", "encoder-decoder", "recurrent", "ngram"}
        assert all(field.description for field in spec.model_fields.values()), kind
        assert spec().kind == kind, "a task is used by its name alone, so every field has a default"
