"""Tokenizers: decoding restores the text, special tokens come first, training gives the same bits in every process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from data_files import make_tokenizer, write_file
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from tokenizers import Tokenizer, processors

from manyheads.data.tokenized import fingerprint
from manyheads.data.tokenizer import SPECIAL_TOKENS, special_ids, special_tokens_as_text

ADJECTIVES, NOUNS = ("old", "younger", "unhappy", "größte", "naïve"), ("cat", "catfish", "fisher", "houses", "домов")
PHRASES = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
TEXTS = [f"the {phrase} saw {i} of {i * i} other things, didn't it?" for i, phrase in enumerate(PHRASES)]
SIZES = {"bpe": {"vocab_size": 300}, "wordpiece": {"vocab_size": 90}, "unigram": {"vocab_size": 280}}
KINDS = ("bytes", "characters", "words", "bpe", "wordpiece", "unigram")


@pytest.fixture(scope="module")
def trained():
    return {kind: make_tokenizer(kind, TEXTS, **SIZES.get(kind, {})) for kind in KINDS}


@given(st.text())
def test_decoding_restores_the_text(trained, text):
    for kind in ("bytes", "bpe", "unigram"):
        assert trained[kind].decode(trained[kind].encode(text).ids) == text
    if text:
        own = make_tokenizer("characters", [text])
        assert own.decode(own.encode(text).ids) == text
        assert len(own.encode(text).ids) == len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_no_text_becomes_one(trained, kind):
    tokenizer = trained[kind]
    assert (
        [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
        == list(range(5))
        == list(special_ids(tokenizer).values())
    )
    for text in ("".join(SPECIAL_TOKENS), "a</s><pad>", *TEXTS):
        assert set(tokenizer.encode(text).ids) & set(range(5)) <= {special_ids(tokenizer)["unk"]}
    assert tokenizer.post_processor is None
    assert tokenizer.padding is None
    assert tokenizer.truncation is None
    assert tokenizer.encode("").ids == []
    text = tokenizer.decode([1, *tokenizer.encode(TEXTS[0]).ids, 2, 0, 0])  # special tokens are not decoded
    assert text == TEXTS[0] or (kind == "wordpiece" and text.replace(" ' ", "'") == TEXTS[0])


def test_ids_of_bytes_are_the_bytes(trained):
    assert trained["bytes"].get_vocab_size() == 261
    assert [i - 5 for i in trained["bytes"].encode("aé\n").ids] == list("aé\n".encode())


def test_words_digits_and_punctuation_are_tokens_of_their_own():
    words = make_tokenizer("words", ["Don't go to 12.5, Ünal!"])
    tokens = [token.strip("▁") for token in words.encode("Don't go to 12.5, Ünal!").tokens]
    assert tokens == ["Don", "'", "t", "go", "to", *"12.5,", "Ünal", "!"]
    assert make_tokenizer("words", ["Ab ab aB"], lowercase=True).get_vocab_size() == 6
    assert make_tokenizer("words", ["a a b"], min_frequency=2).get_vocab_size() == 6
    assert make_tokenizer("words", ["a b c d"], vocab_size=7).get_vocab_size() == 7


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_texts_that_are_all_empty_give_no_tokenizer(kind):
    with raises("data.tokenizer"):
        make_tokenizer(kind, ["", ""])
    assert make_tokenizer(kind, ["", "a"])


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_vocabulary_too_large_is_an_error_with_the_largest_possible(kind):
    with raises("data.tokenizer", "50,000") as caught:
        make_tokenizer(kind, TEXTS, vocab_size=50_000)
    largest = next(int(word) for word in caught.value.hint.split() if word.isdecimal())
    assert make_tokenizer(kind, TEXTS, vocab_size=largest).get_vocab_size() == largest
    with raises("data.tokenizer", "20"):
        make_tokenizer(kind, TEXTS, vocab_size=20)
    with raises("data.tokenizer"):
        make_tokenizer(kind, ["", ""])


def test_training_gives_the_same_bits_in_every_process(trained):
    code = """
import json, sys
from manyheads.data.tokenized import fingerprint
from manyheads.spec import SLOTS
texts, specs = json.load(sys.stdin)
print(json.dumps([fingerprint(SLOTS["tokenizer"].from_config(spec).make(texts)) for spec in specs]))
"""
    stdin = json.dumps([TEXTS, [{"kind": kind, **SIZES.get(kind, {})} for kind in KINDS]])
    expected = [fingerprint(trained[kind]) for kind in KINDS]
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == expected


def test_a_tokenizer_file_is_used_without_its_padding_truncation_and_post_processor(trained, tmp_path):
    copy = Tokenizer.from_str(trained["bpe"].to_str())
    copy.enable_padding(length=50)
    copy.enable_truncation(3)
    copy.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path / "tokenizer.json"
    copy.save(str(path))
    tokenizer = make_tokenizer("file", path=str(path))
    assert tokenizer.encode(TEXTS[0] + "<s>").ids == trained["bpe"].encode(TEXTS[0] + "<s>").ids


def test_a_broken_tokenizer_file_is_refused(trained, tmp_path):
    broken = (
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
        trained["bpe"].to_str().encode()[:-9],
    )
    for content in broken:
        path = write_file(tmp_path, "broken.json", content)
        with raises("data.tokenizer", path):
            make_tokenizer("file", path=path)
    with (tmp_path / "huge.json").open("wb") as handle:
        handle.truncate((64 << 20) + 1)
    with raises("data.too-large", tmp_path / "huge.json"):
        make_tokenizer("file", path=str(tmp_path / "huge.json"))
    with raises("data.file", tmp_path / "none.json"):
        make_tokenizer("file", path=str(tmp_path / "none.json"))
    with raises("data.tokenizer", "init_from"):
        make_tokenizer("checkpoint")


def test_a_tokenizer_that_reads_special_tokens_in_texts_is_copied_not_changed(trained):
    tokenizer = Tokenizer.from_str(trained["bpe"].to_str())  # the setting is not stored in tokenizer.json
    assert tokenizer.encode("a</s>").ids[-1] == 2
    assert 2 not in special_tokens_as_text(tokenizer).encode("a</s>").ids
    assert tokenizer.encode("a</s>").ids[-1] == 2
    assert special_tokens_as_text(trained["bpe"]).encode("a</s>").ids == trained["bpe"].encode("a</s>").ids
