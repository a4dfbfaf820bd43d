"""Tokenizers: from texts to ids and back, all as `tokenizers.Tokenizer`, with the same five special tokens first."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from manyheads.data.source import DataError
from manyheads.spec import Part, field

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")  # ids 0 … 4 of every tokenizer trained here
LARGEST_TOKENIZER = 64 << 20

# how the special tokens are spelt in other people's files
SPELT = (
    ("<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"),
    ("<s>", "[CLS]", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    ("</s>", "[SEP]", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    ("<unk>", "[UNK]"),
    ("<mask>", "[MASK]"),
)


class Special(NamedTuple):
    """The ids of the special tokens; None where a tokenizer has none."""

    pad: int | None
    begin: int | None
    end: int | None
    unknown: int | None
    mask: int | None


def special_ids(tokenizer: Tokenizer) -> Special:
    """Which tokens pad, begin, end, stand for the unknown, and mask, by the names they usually have."""
    found = ([tokenizer.token_to_id(name) for name in names] for names in SPELT)
    return Special(*(next((place for place in places if place is not None), None) for places in found))


class TokenizerSpec(Part, slot="tokenizer", default="words"):
    """Cuts a text into tokens and puts it together again. No <s> and no </s> is added: that is the objective's."""

    @abstractmethod
    def make(self, texts: Iterable[str]) -> Tokenizer:
        raise NotImplementedError


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    """The special tokens known as such; a text that happens to say </s> remains a text."""
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate((*SPECIAL, *tokens))}


def _some(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise DataError("there is no text to make a tokenizer from")


@contextmanager
def _no_panic(sentence: str) -> Iterator[None]:
    """The library's panics are no Exceptions: here they become one."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(f"{sentence}: {error}") from None


def _byte_characters() -> list[str]:
    """The 256 characters by which the byte level writes bytes, in the order of the bytes."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in plain]
    written = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [written[b] for b in range(256)]


class BytesSpec(TokenizerSpec, kind="bytes"):
    """One token a byte of UTF-8: 256 of them, and nothing is ever unknown"""

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=_numbered(_byte_characters()), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return _ready(tokenizer)


class CharactersSpec(TokenizerSpec, kind="characters"):
    """One token a character that occurs"""

    least: int = field(1, "how often a character must occur, or it is unknown", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        counts: Counter[str] = Counter()
        for text in _some(texts):
            counts.update(text)
        vocab = _numbered(sorted(c for c, count in counts.items() if count >= self.least))
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=False))
        tokenizer.decoder = decoders.Fuse()
        return _ready(tokenizer)


# a word with the space before it, a digit, any other mark, a space too many
WORD = Regex(r"▁?[\p{L}\p{M}]+|▁?\p{N}|▁?[^\s▁\p{L}\p{M}\p{N}]|▁|\s")


class WordsSpec(TokenizerSpec, kind="words"):
    """One token a word, a digit or a punctuation mark; ▁ stands for the space before it

    So a decoded text has its spaces where they were: only what was unknown is lost, and white space at either end.
    """

    lower: bool = field(False, "whether all letters are made small")
    least: int = field(1, "how often a word must occur, or it is unknown", ge=1)
    size: int = field(30_000, "tokens at most; the most frequent are kept", ge=len(SPECIAL) + 1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token="<unk>"))
        strip = normalizers.Strip()
        tokenizer.normalizer = normalizers.Sequence([strip, normalizers.Lowercase()]) if self.lower else strip
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="always", split=False), pre_tokenizers.Split(WORD, "isolated")]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
        trainer = trainers.WordLevelTrainer(
            vocab_size=self.size, min_frequency=self.least, special_tokens=list(SPECIAL), show_progress=False
        )
        tokenizer.train_from_iterator(_some(texts), trainer)
        return _ready(tokenizer)


class TrainedSpec(TokenizerSpec):
    """What the tokenizers with learned pieces share."""

    size: int = field(8000, "tokens in all; more than the texts give is refused", ge=len(SPECIAL) + 1)

    def _train(self, tokenizer: Tokenizer, texts: Iterable[str], trainer: Any) -> Tokenizer:
        with _no_panic(f"these texts do not give a vocabulary of {self.size:,}"):
            tokenizer.train_from_iterator(_some(texts), trainer)
        found = tokenizer.get_vocab_size()
        if found < self.size:
            raise DataError(
                f"a vocabulary of {self.size:,} was asked for, and these texts give {found:,} at most; set size to that or less"
            )
        if found > self.size:
            raise DataError(f"a vocabulary of {self.size:,} was asked for, and these texts need {found:,} at least")
        return _ready(tokenizer)

    def _settings(self) -> dict[str, Any]:
        return {"vocab_size": self.size, "special_tokens": list(SPECIAL), "show_progress": False}


def _byte_level(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class BPESpec(TrainedSpec, kind="bpe"):
    """Bytes, and then the most frequent pair of pieces made one, again and again

    Sennrich, Haddow and Birch 2016, arXiv 1508.07909.
    """

    least: int = field(2, "how often a pair must occur to become one", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        trainer = trainers.BpeTrainer(**self._settings(), min_frequency=self.least, initial_alphabet=_byte_characters())
        return self._train(_byte_level(Tokenizer(models.BPE())), texts, trainer)


class WordPieceSpec(TrainedSpec, kind="wordpiece"):
    """Words, cut into the longest known pieces from the left; ## begins a piece that goes on

    Schuster and Nakajima 2012. White space is not kept.
    """

    lower: bool = field(False, "whether all letters are made small")
    least: int = field(2, "how often a pair must occur to become one", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocab={}, unk_token="<unk>"))
        if self.lower:
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
        known = list(texts)
        inner = {c for text in known for word in (text.lower() if self.lower else text).split() for c in word[1:]}
        # the trainer numbers what goes on in a random order, and breaks ties by number: named beforehand, the order is ours
        settings = self._settings() | {"special_tokens": [*SPECIAL, *(f"##{c}" for c in sorted(inner))]}
        self._train(tokenizer, known, trainers.WordPieceTrainer(**settings, min_frequency=self.least))
        ready = Tokenizer(models.WordPiece(vocab=tokenizer.get_vocab(), unk_token="<unk>"))
        ready.normalizer, ready.pre_tokenizer, ready.decoder = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
        return _ready(ready)


class UnigramSpec(TrainedSpec, kind="unigram"):
    """The cut whose pieces are together the most likely

    Kudo 2018, arXiv 1804.10959; over bytes, so that nothing is unknown.
    """

    def make(self, texts: Iterable[str]) -> Tokenizer:
        trainer = trainers.UnigramTrainer(**self._settings(), initial_alphabet=_byte_characters(), unk_token="<unk>")
        trained = self._train(_byte_level(Tokenizer(models.Unigram())), texts, trainer)
        # the trainer sums in a random order and ranks bytes that never occur at random: without those last digits it is the same each time
        scores = [(token, round(score, 6)) for token, score in json.loads(trained.to_str())["model"]["vocab"][len(SPECIAL) :]]
        lowest = min(score for _, score in scores)
        scores = [(token, lowest if len(token) == 1 and score < lowest + 0.03 else score) for token, score in scores]
        vocab = [*((token, 0.0) for token in SPECIAL), *sorted(scores, key=lambda pair: (-pair[1], pair[0]))]
        return _ready(_byte_level(Tokenizer(models.Unigram(vocab, unk_id=SPECIAL.index("<unk>")))))


class TokenizerFileSpec(TokenizerSpec, kind="file"):
    """As a tokenizer.json says, without padding, cutting and special tokens of its own"""

    path: str = field(..., "the tokenizer.json", min_length=1)

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        try:
            with Path(self.path).open("rb") as file:
                data = file.read(LARGEST_TOKENIZER + 1)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from None
        if len(data) > LARGEST_TOKENIZER:
            raise DataError(f"{self.path} has more than {LARGEST_TOKENIZER:,} bytes; no tokenizer needs that")
        with _no_panic(f"{self.path} is no tokenizer"):
            tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.post_processor = None
        tokenizer.encode_special_tokens = True
        return tokenizer


class CheckpointTokenizerSpec(TokenizerSpec, kind="checkpoint"):
    """As the checkpoint has it that a run begins from"""

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        raise DataError("there is no checkpoint to take a tokenizer from: say with start = … where the run begins")
