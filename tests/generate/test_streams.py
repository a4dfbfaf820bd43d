"""Generated texts: stop strings never leak, streams concatenate to the whole text, and results say why they ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import VOCAB, decoder, random_model
from raising import raises
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import manyheads
from manyheads import Checkpoint
from manyheads.convert.fairseq.model import FairseqTokenizer
from manyheads.generate.config import CheckpointSettings
from manyheads.generate.generator import TextGenerator
from manyheads.generate.text import PartialText, StopStrings, TextStreamer, find_stop
from manyheads.generate.vocabulary import TokenDecoder
from manyheads.spec import to_tree

SYMBOLS = pre_tokenizers.ByteLevel.alphabet()


def byte_level():
    """One token per byte, so that a character may need four."""
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(sorted(SYMBOLS))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece():
    words = [
        "[UNK]",
        "do",
        "n",
        "'",
        "t",
        "##n",
        ".",
        ",",
        "!",
        "a",
        "##b",
        "is",
        "s",
        "##s",
        "I",
        "m",
        "ve",
        "re",
        "we",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def fallback():
    """Words with ▁ and bytes for the rest, as SentencePiece has."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "▁b", "c", "▁"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_level(decoder=None):
    """Words of which some have a meaning for a decoder, or none without one, which is a space between them."""
    words = ["<unk>", "a", "▁", "▁b", "c▁▁d", "e</w>", "</w>", "|", "<pad>", "##f", "##", ".", "n't", "<0x41>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


class Fairseq(FairseqTokenizer):
    def __init__(self):
        self.ids, self.target = {}, ("<s>", "<pad>", "</s>", "<unk>", "a@@", "b", "@@", ".", "\u2003")

    def get_vocab_size(self):
        return len(self.target)


TOKENIZERS = {
    "byte-level": byte_level(),
    "word-piece": word_piece(),
    "fallback": fallback(),
    "joined by spaces": word_level(),
    "metaspace": word_level(decoders.Metaspace()),
    "metaspace-never": word_level(decoders.Metaspace(prepend_scheme="never")),
    "bpe": word_level(decoders.BPEDecoder()),
    "ctc": word_level(decoders.CTC()),
    "word-piece, other": word_level(decoders.WordPiece()),
    "any": word_level(decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "x")])),
    "any-strip": word_level(decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0)])),
    "fairseq": Fairseq(),
}
for tokenizer in TOKENIZERS.values():
    if isinstance(tokenizer, Tokenizer):
        tokenizer.add_special_tokens(["<s>"])  # which has no text, and is between others as if it were not there


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_of_a_stream_are_the_text_up_to_the_first_stop_string(name, data):
    tokenizer = TOKENIZERS[name]
    some = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24)
    if name in ("byte-level", "fallback"):  # characters of several tokens, whole and not
        characters = st.text(alphabet="aé€😀", max_size=12).map(lambda text: tokenizer.encode(text).ids)
        some = st.lists(st.one_of(some, characters), max_size=3).map(lambda parts: [i for part in parts for i in part])
    ids = data.draw(some)
    whole = tokenizer.decode(ids)
    inside = st.builds(lambda i, n: whole[i : i + n], st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4))
    stops = data.draw(st.lists(st.one_of(inside.filter(bool), st.text(min_size=1, max_size=3)), max_size=2))
    empty = PartialText(tokenizer.decode, TokenDecoder(tokenizer), window=data.draw(st.integers(1, 6)))
    stream, stopping, pieces = TextStreamer(empty, stops), StopStrings(empty, stops), []
    for count in range(1, len(ids) + 1):
        pieces.append(stream.push(ids[count - 1]))
        assert stream.text.text == tokenizer.decode(ids[:count])
        is_stopped = find_stop(stream.text.text, stops) is not None
        assert stopping.is_complete(ids[:count]) == is_stopped
        if is_stopped:
            break
    final = stream.text.text
    found = find_stop(final, stops)
    final = final[: found[0]] if found else final
    pieces.append(stream.send(final))
    assert "".join(pieces) == final
    assert not any(stop in "".join(pieces) for stop in stops)


@pytest.mark.parametrize("name", ["byte-level", "fallback", "word-piece", "metaspace", "bpe", "fairseq"])
def test_a_token_of_a_long_text_costs_no_more_than_one_of_a_short_text(name):
    """As many tokens are decoded for each, whatever the text, and the stop strings that it does not have."""
    tokenizer, sizes = TOKENIZERS[name], []

    def decode(ids):
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    empty = PartialText(decode, TokenDecoder(tokenizer))
    stream, stopping = TextStreamer(empty, ["zzz"]), StopStrings(empty, ["zzz"])
    first = tokenizer.token_to_id("a") if name == "byte-level" else tokenizer.get_vocab_size() - 4
    ids = [first + i % 3 for i in range(300)]
    for count in range(1, len(ids) + 1):
        stream.push(ids[count - 1])
        stopping.is_complete(ids[:count])
        assert len(stopping.texts) <= 2
    assert max(sizes) <= 2 * empty.window
    assert len(sizes) < 3 * len(ids)


@given(text=st.text(max_size=20))
def test_a_piece_is_never_half_a_character(text):
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStreamer(PartialText(tokenizer.decode, TokenDecoder(tokenizer)))
    for token in tokenizer.encode(text).ids:
        assert "\ufffd" not in stream.push(token) or "\ufffd" in text


def test_a_tokenizer_that_fails_for_one_token_is_an_error_of_the_checkpoint():
    """Its library panics if both ends of a token are the character to strip."""
    generator = TextGenerator(None, word_level(decoders.Strip("a", 1, 1)))
    assert generator.token_name(2) == "▁"
    with raises("checkpoint.tokenizer"):
        generator.token_name(1)


def checkpoint():
    tokenizer = byte_level()
    spec = manyheads.read_model(to_tree(decoder()) | {"vocab": tokenizer.get_vocab_size()})
    return Checkpoint(random_model(spec), tokenizer)


def test_of_stop_strings_that_begin_together_the_longest_is_reported():
    assert find_stop("one two", ["tw", "two", "t"]) == (4, "two")
    assert find_stop("one two", ["two", "ne"]) == (1, "ne")


def test_a_text_ends_before_its_stop_string_in_every_method():
    model = checkpoint()
    whole = model.generate("Once upon", max_new_tokens=30)
    stop = whole[10:12]
    for settings in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"penalty_alpha": 0.01, "top_k": 1}):
        found = model.generate("Once upon", max_new_tokens=30, stop=[stop], details=True, **settings)
        assert stop not in found.text
        if not settings:
            assert found.text == whole[: whole.index(stop)]
            assert (found.finish_reason, found.stop) == ("stop", stop)
    assert model.generate("Once upon", max_new_tokens=30, details=True).finish_reason == "length"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5},
        {"num_beams": 3},
        {"decoding": "gnmt-beam"},
        {"num_beams": 4, "num_beam_groups": 2},
        {"prompt_lookup_num_tokens": 4},
        {"penalty_alpha": 0.4},
    ],
    ids=str,
)
def test_a_stop_string_that_the_last_token_completes_ends_the_text(settings):
    same = {"forced_prefix": "abc", "max_new_tokens": 3, "details": True} | settings
    found = checkpoint().generate("Once upon", stop=["bc"], **same)
    assert (found.text, found.finish_reason, found.stop) == ("a", "stop", "bc")
    assert checkpoint().generate("Once upon", stop=["bd"], **same).finish_reason == "length"


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.5, "seed": 3}, {"num_beams": 3}, {"stop": ["a", "\n"]}], ids=str
)
def test_a_stream_is_the_generated_text(settings):
    model = checkpoint()
    pieces = list(model.stream("Once upon", max_new_tokens=20, **settings))
    assert "".join(pieces) == model.generate("Once upon", max_new_tokens=20, **settings)


def test_a_text_ends_before_the_stop_tokens_of_the_caller():
    checkpoint = Checkpoint(random_model(decoder()))
    tokens = checkpoint.generate([3, 4], max_new_tokens=6)
    for eos_token_id in (tokens[3], [tokens[3]], (VOCAB + 5, tokens[3])):
        result = checkpoint.generate([3, 4], max_new_tokens=6, eos_token_id=eos_token_id, details=True)
        assert (result.token_ids, result.finish_reason) == (tokens[: tokens.index(tokens[3])], "stop")
    ending = replace(checkpoint, metadata=None)
    ending.__dict__["generation_settings"] = CheckpointSettings(eos_token_id=(tokens[1],))
    assert ending.generate([3, 4], max_new_tokens=6) == tokens[: tokens.index(tokens[1])]
    assert ending.generate([3, 4], max_new_tokens=6, eos_token_id=VOCAB + 5) == tokens
    for wrong in (-1, "2", [1.0], [[1]], True, b"ab"):
        with raises("generate.config"):
            checkpoint.generate([3, 4], eos_token_id=wrong)


def test_a_stream_has_one_sequence():
    for wrong in ({"n": 2, "temperature": 1.0}, {"logprobs": 1}):
        with raises("generate.config"):
            list(checkpoint().stream("Once", **wrong))
    for stop in ([""], ["x"] * 17, [3], ["x" * 2000]):
        with raises("generate.config", "stop"):
            checkpoint().generate("Once", stop=stop)
