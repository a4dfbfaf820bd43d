"""Scores of given texts: against a literal oracle, transformers and generation; windows, batches, contexts and sources."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from kinds import VOCAB, decoder, encoder, ngram, pair, random_model, recurrent, tokens
from raising import raises
from small_checkpoints import folder_of
from small_runs import described, train_all
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import manyheads
from manyheads import Checkpoint
from manyheads.generate import score as module
from manyheads.generate.score import windows

LEARNED = {"kind": "learned", "length": 8}
SHAPES = {
    "decoder": decoder(position=LEARNED),
    "unlimited": decoder(position="sinusoidal"),
    "rope-by-length": decoder(
        position={"kind": "rope", "scaling": {"kind": "dynamic", "factor": 3.0, "length": 4}},
    ),
    "pair": pair(position=LEARNED),
    "recurrent": recurrent(),
    "recurrent-language": recurrent(source=False),
    "ngram": ngram(),
}
WITH_SOURCE, START = ("pair", "recurrent"), 1
ROWS = [row[:length] for row, length in zip(tokens(5, 30).tolist(), (3, 30, 9, 2, 17), strict=True)]
SOURCES = [row[: i + 1] for i, row in enumerate(tokens(5, 6, seed=9).tolist())]


def score(name, rows, dtype=torch.float64, **options):
    """The log-probabilities of each row."""
    if name in WITH_SOURCE:
        options = {"source": SOURCES[: len(rows)], "decoder_start_token_id": START} | options
    checkpoint = Checkpoint(random_model(SHAPES[name], dtype))
    return [[token.logprob for token in item.tokens] for item in checkpoint.score(rows, **options)]


@torch.no_grad()
def literal(name, row, source, stride):
    """ln p of each token by a forward pass of its own over the tokens of the first window that predicts it."""
    model, values = random_model(SHAPES[name]), []
    stack = model.spec.decoder
    size = stack.max_positions if stack and stack.max_positions else len(row) + 1
    stride, ids = stride or size // 2, [START, *row] if name in WITH_SOURCE else row
    for t in range(1, len(ids)):
        start = 0
        while t > start + size:
            start += stride
        last = min(start + size, len(ids) - 1)  # RoPE that depends on the length is that of the whole window
        before = torch.tensor([ids[start:last]])
        logits = model(before) if name not in WITH_SOURCE else model(before, torch.tensor([source]))
        values.append(float(logits[0, t - start - 1].softmax(-1)[ids[t]].log()))
    return values if name in WITH_SOURCE else [None, *values]


@given(count=st.integers(2, 60), size=st.integers(1, 20), data=st.data())
def test_windows_predict_each_token_once_after_enough_others(count, size, data):
    stride = data.draw(st.integers(1, size))
    predicted = []
    for part, first in windows(count, size, stride):
        assert part.stop - part.start - 1 <= size
        new = range(first, part.stop)
        assert new, "no window is read for nothing"
        assert all(t - part.start > (size - stride if part.start else t - 1) for t in new)
        predicted += new
    assert predicted == list(range(1, count))


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_each_token_is_scored_after_the_tokens_of_its_window(name, stride):
    for row, source, values in zip(ROWS, SOURCES, score(name, ROWS, stride=stride), strict=True):
        assert values == pytest.approx(literal(name, row, source, stride), abs=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_has_the_same_score_alone_and_in_a_batch(name):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        together = score(name, ROWS, dtype)
        for i, row in enumerate(ROWS):
            alone = score(name, [row], dtype, **({"source": SOURCES[i]} if name in WITH_SOURCE else {}))
            assert together[i] == pytest.approx(alone[0], abs=tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_with_too_many_logits_is_read_in_steps(name, monkeypatch):
    whole = score(name, ROWS)
    monkeypatch.setattr(module, "BATCH_LOGITS", 5 * VOCAB)
    for item, other in zip(score(name, ROWS), whole, strict=True):
        assert item == pytest.approx(other, abs=1e-10)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:the text is longer than")
def test_a_generated_text_has_the_log_probabilities_that_generation_reports(name):
    checkpoint = Checkpoint(random_model(SHAPES[name]))
    if name in WITH_SOURCE:
        prompt, options = SOURCES[4], {"source": SOURCES[4], "decoder_start_token_id": START}
    else:
        prompt, options = ROWS[0], {"context": ROWS[0]}
    start = {"decoder_start_token_id": START} if name in WITH_SOURCE else {}
    generated = checkpoint.generate(prompt, max_new_tokens=5, logprobs=0, **start)
    scored = checkpoint.score(generated.token_ids, **options)
    if name == "rope-by-length":  # generation knows the length after its last token, one more than is read here
        scored = checkpoint.score([*generated.token_ids, 0], **options)
    values = [token.logprob for token in scored.tokens][: len(generated.token_ids)]
    assert values == pytest.approx(generated.logprobs, abs=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gpt-neox"])
@torch.no_grad()
def test_scores_are_those_of_transformers(name, tmp_path):
    """Of a text of 90 tokens, with 40 positions, in windows with a stride of 15."""
    folder = folder_of(name, tmp_path / name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours, text = manyheads.load(folder, dtype=torch.float64), " ".join(f"word{i * i % 50}" for i in range(90))
    scored = ours.score(text, stride=15)
    ids = torch.tensor([[token.id for token in scored.tokens]])
    expected, end = [None], 1
    for start in range(0, 90, 15):
        stop = min(start + 41, 90)
        logp = theirs(ids[:, start : stop - 1]).logits[0].log_softmax(-1)
        new = logp.gather(1, ids[0, start + 1 : stop, None])[:, 0].tolist()
        expected += new[len(new) - (stop - end) :]
        end = stop
        if stop == 90:
            break
    assert [token.logprob for token in scored.tokens] == pytest.approx(expected, abs=1e-6)  # RoPE is float32 there
    mean = -sum(expected[1:]) / 89
    assert (scored.count, scored.logprob) == (89, pytest.approx(-89 * mean))
    assert scored.perplexity == pytest.approx(math.exp(mean))
    assert scored.bits_per_token == pytest.approx(mean / math.log(2))
    assert scored.tokens[3].surprisal == pytest.approx(-math.log2(math.exp(expected[3])))


@pytest.mark.parametrize("name", ["bart", "t5"])
@torch.no_grad()
def test_the_score_of_a_target_is_that_of_transformers(name, tmp_path):
    folder = folder_of(name, tmp_path / name)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    own.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    ours, source, text = manyheads.load(folder, dtype=torch.float64), "word3 word1 word4", "word1 word5 word9"
    more = {"decoder_start_token_id": START} if name == "t5" else {}  # its config has none
    scored = ours.score(text, source=source, **more)
    assert [token.token for token in scored.tokens] == [*text.split(), "[SEP]"], "the end of the target is scored"
    labels = torch.tensor([[token.id for token in scored.tokens]])
    start = torch.tensor([[START if name == "t5" else theirs.config.decoder_start_token_id]])
    logits = theirs(
        input_ids=torch.tensor(ours.encode_ids([source])), decoder_input_ids=torch.cat((start, labels[:, :-1]), 1)
    ).logits
    expected = logits[0].log_softmax(-1).gather(1, labels[0, :, None])[:, 0].tolist()
    assert [token.logprob for token in scored.tokens] == pytest.approx(expected, abs=1e-6)  # T5's norm is float32 there


# --------------------------------------------------------------------------------------------------- texts and contexts


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A decoder whose tokens are bytes and a few longer ones, with bos before every text."""
    folder = folder_of("llama", tmp_path_factory.mktemp("bytes") / "llama", tokenizer=False, vocab_size=280)
    vocab = {item: i for i, item in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = [("a", "b"), ("Ġ", "ab"), ("ab", "ab")]
    own = Tokenizer(models.BPE(vocab | {"".join(merge): 257 + i for i, merge in enumerate(merges)}, merges))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(["<s>"])
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own.save(str(folder / "tokenizer.json"))
    return manyheads.load(folder, dtype=torch.float64)


CHARACTERS = st.text("ab  c\né漢🙂", min_size=1, max_size=12)


@given(texts=st.lists(CHARACTERS, min_size=1, max_size=4), context=CHARACTERS | st.none())
def test_the_pieces_of_the_tokens_are_the_text(texts, context, byte_level):
    for text, scored in zip(texts, byte_level.score(texts, context=context), strict=True):
        assert scored.text == text == "".join(token.text for token in scored.tokens)
        assert all(token.logprob is not None for token in scored.tokens), "bos is before the first token"


@given(context=CHARACTERS, text=CHARACTERS)
def test_a_text_and_its_context_have_the_product_of_their_probabilities(context, text, byte_level):
    whole, after = byte_level.score(context + text), byte_level.score(text, context=context)
    assert [token.id for token in whole.tokens][-len(after.tokens) :] == [token.id for token in after.tokens]
    before = whole.tokens[: len(whole.tokens) - len(after.tokens)]
    assert whole.logprob == pytest.approx(sum(token.logprob for token in before) + after.logprob, abs=1e-9)
    joined = [token.token for token in byte_level.score(context).tokens] == [token.token for token in before]
    if joined:  # no token has characters of both
        assert whole.logprob == pytest.approx(byte_level.score(context).logprob + after.logprob, abs=1e-9)


def test_a_token_of_context_and_text_belongs_to_the_text(byte_level):
    scored = byte_level.score("b c", context="c a")
    assert [(token.token, token.text) for token in scored.tokens] == [(" ab", "b"), (" ", " "), ("c", "c")]


def test_without_bos_and_context_the_first_token_has_no_probability(tmp_path):
    checkpoint = manyheads.load(folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None))
    first, *others = checkpoint.score("word1 word2 word3").tokens
    assert (first.logprob, first.surprisal) == (None, None)
    assert all(token.logprob < 0 for token in others)
    after = checkpoint.score("word2 word3", context="word1 ")
    assert [token.logprob for token in after.tokens] == pytest.approx([token.logprob for token in others], abs=1e-5)
    with raises("input.length", "context"):
        checkpoint.score("word1")
    assert checkpoint.score("word1", context="word2 ").count == 1


def test_contexts_and_sources_are_one_for_all_or_one_each():
    checkpoint = Checkpoint(random_model(SHAPES["unlimited"]))
    each = checkpoint.score([[1, 2], [3]], context=[[4, 5], [6]])
    assert [token.logprob for token in each] == pytest.approx(
        [checkpoint.score([1, 2], context=[4, 5]).logprob, checkpoint.score([3], context=[6]).logprob]
    )
    all_after = checkpoint.score([[1, 2], [3]], context=[4, 5])
    assert all_after[1].logprob == pytest.approx(checkpoint.score([3], context=[4, 5]).logprob)
    with raises("usage.argument", "context"):
        checkpoint.score([[1, 2], [3]], context=[[4], [5], [6]])


def test_a_run_scores_the_whole_of_a_text_that_it_would_truncate(tmp_path):
    train_all(described("causal", steps=1, max_length=16), tmp_path / "run")
    checkpoint = manyheads.load(tmp_path / "run")
    text = "was born in " * 30
    scored = checkpoint.score(text)
    assert len(scored.tokens) > 16
    assert "".join(token.text for token in scored.tokens) == text
    assert scored.tokens[0].logprob is not None, "its tokenizer adds bos"


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("spec", [encoder(), decoder(mask={"causal": False})], ids=["encoder", "bidirectional"])
def test_a_model_that_does_not_predict_the_next_token_is_refused(spec):
    with raises("model.unsupported", spec.architecture):
        Checkpoint(random_model(spec)).score([1, 2, 3])


def test_a_masked_model_is_refused_by_name(tmp_path):
    with raises("model.unsupported", "encoder", "masked"):
        manyheads.load(folder_of("bert", tmp_path / "bert")).score("word1")


@pytest.mark.parametrize(
    ("name", "row", "options", "code"),
    [
        ("decoder", [1, 2], {"source": [3]}, "usage.argument"),
        ("decoder", [1, 2], {"stride": 0}, "usage.argument"),
        ("decoder", [1, 2], {"stride": 9}, "usage.argument"),
        ("decoder", [1, 2], {"stride": 2.0}, "usage.argument"),
        ("decoder", [[]], {}, "input.length"),
        ("decoder", [[]], {"context": [1]}, "input.length"),
        ("decoder", [1], {}, "input.length"),
        ("decoder", [1, VOCAB], {}, "input.invalid"),
        ("decoder", [1, -1], {}, "input.invalid"),
        ("decoder", [1, 2], {"context": [VOCAB]}, "input.invalid"),
        ("decoder", [1, 2], {"context": "text"}, "input.shape"),
        ("decoder", 3, {}, "input.shape"),
        ("decoder", "text", {}, "checkpoint.tokenizer"),
        ("pair", [1, 2], {}, "usage.argument"),
        ("pair", [1, 2], {"source": [3]}, "model.unsupported"),
        ("pair", [1, 2], {"source": [], "decoder_start_token_id": 1}, "input.length"),
        ("pair", [1, 2], {"source": [3], "decoder_start_token_id": VOCAB}, "input.invalid"),
        ("pair", [1, 2], {"source": [3], "decoder_start_token_id": "a"}, "generate.config"),
    ],
)
def test_what_cannot_be_scored_is_an_error(name, row, options, code):
    with raises(code):
        Checkpoint(random_model(SHAPES[name])).score(row, **options)


@pytest.mark.parametrize("verb", ["score", "generate"])
@pytest.mark.parametrize(("row", "code"), [([], "input.length"), ([1.5], "input.shape"), ([1, 99], "input.invalid")])
def test_the_text_with_an_error_is_known(verb, row, code):
    with raises(code) as caught:
        getattr(Checkpoint(random_model(SHAPES["decoder"])), verb)([[1, 2], row])
    assert caught.value.index == 1


def test_a_model_that_computes_nan_is_an_error_that_names_the_layer():
    model = random_model(SHAPES["decoder"])
    with torch.no_grad():
        model.last.layers[1].feedforward.up.weight[0, 0] = math.nan
    with raises("model.non-finite", "layers.1"):
        Checkpoint(model).score([1, 2, 3])
