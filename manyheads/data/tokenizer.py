"""Tokenizers, all as `tokenizers.Tokenizer`; those trained here begin with the same five special tokens."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from manyheads.errors import DataFileError, DataSizeError, TokenizerError
from manyheads.files.read import read_bytes
from manyheads.files.tokenizer import MAX_TOKENIZER_BYTES, copy_tokenizer, explain_tokenizer_errors, parse_tokenizer
from manyheads.spec import Part, field

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")  # ids 0 … 4 of every tokenizer trained here

# spellings of the special tokens in other tokenizers, by role
SPECIAL_SPELLINGS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"),
    "bos": ("<s>", "[CLS]", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "[SEP]", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]", "<MASK>"),
}


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Finds the special tokens of any tokenizer by their usual spellings; None if it does not have one."""
    ids = {role: map(tokenizer.token_to_id, names) for role, names in SPECIAL_SPELLINGS.items()}
    return {role: next((id_ for id_ in candidates if id_ is not None), None) for role, candidates in ids.items()}


def special_tokens_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Returns this tokenizer, or a copy of it, that reads "</s>" within a text as text, not as the special token."""
    return tokenizer if tokenizer.encode_special_tokens else copy_tokenizer(tokenizer, encode_special_tokens=True)


def without_processing(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy that adds no special tokens, and neither pads nor truncates."""
    return _remove_processing(copy_tokenizer(tokenizer))


def _remove_processing(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None
    return tokenizer


class TokenizerSpec(Part, slot="tokenizer", default="words"):
    """Splits a text into tokens and joins them again. It adds no <s> and no </s>: the task does."""

    adds_tokens: ClassVar[bool] = True  # whether a task may add special tokens to it
    from_checkpoint: ClassVar[bool] = False  # whether it is the tokenizer of the initial checkpoint

    @abstractmethod
    def make(self, texts: Iterable[str]) -> Tokenizer:
        """Makes the tokenizer, trained on these texts if its kind is trained."""


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _vocab(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate((*SPECIAL_TOKENS, *tokens))}


def _nonempty(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts; raises at their end if all are empty."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise TokenizerError("there is no text to train a tokenizer on")


def byte_characters() -> list[str]:
    """Returns the 256 characters that stand for bytes in byte-level tokenizers (GPT-2), in the order of the bytes."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    characters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [characters[b] for b in range(256)]


class BytesSpec(TokenizerSpec, kind="bytes"):
    """One token per byte of UTF-8: 256 of them, and no text is unknown"""

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=_vocab(byte_characters()), merges=[]))
        return _with_special_tokens(_byte_level(tokenizer, use_regex=False))


class CharactersSpec(TokenizerSpec, kind="characters"):
    """One token per character of the training texts"""

    min_frequency: int = field(1, "occurrences a character needs to get a token", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        counts: Counter[str] = Counter()
        for text in _nonempty(texts):
            counts.update(text)
        vocab = _vocab(sorted(c for c, count in counts.items() if count >= self.min_frequency))
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=False))
        tokenizer.decoder = decoders.Fuse()
        return _with_special_tokens(tokenizer)


# a word with the space before it, a digit, a punctuation mark, or another space
WORD = Regex(r"▁?[\p{L}\p{M}]+|▁?\p{N}|▁?[^\s▁\p{L}\p{M}\p{N}]|▁|\s")


class WordsSpec(TokenizerSpec, kind="words"):
    """One token per word, digit or punctuation mark; ▁ stands for the space before it

    Decoding restores the spaces; only unknown words and white space at either end of a text are lost.
    """

    lowercase: bool = field(False, "convert texts to lower case")
    min_frequency: int = field(1, "occurrences a word needs to get a token", ge=1)
    vocab_size: int = field(30_000, "maximum number of tokens; the most frequent are kept", ge=len(SPECIAL_TOKENS) + 1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token="<unk>"))
        strip = normalizers.Strip()
        tokenizer.normalizer = normalizers.Sequence([strip, normalizers.Lowercase()]) if self.lowercase else strip
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="always", split=False), pre_tokenizers.Split(WORD, "isolated")]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
        trainer = trainers.WordLevelTrainer(**_settings(self.vocab_size), min_frequency=self.min_frequency)
        tokenizer.train_from_iterator(_nonempty(texts), trainer)
        return _with_special_tokens(tokenizer)


class SubwordSpec(TokenizerSpec):
    """Base of the subword tokenizers."""

    vocab_size: int = field(8000, "number of tokens; more than the texts allow is an error", ge=len(SPECIAL_TOKENS) + 1)

    def _train(self, tokenizer: Tokenizer, texts: Iterable[str], trainer: Any) -> Tokenizer:
        with explain_tokenizer_errors(f"these texts do not give a vocabulary of {self.vocab_size:,}"):
            tokenizer.train_from_iterator(_nonempty(texts), trainer)
        size = tokenizer.get_vocab_size()
        bound = "at most" if size < self.vocab_size else "at least"
        if size != self.vocab_size:
            raise TokenizerError(
                f"vocab_size is {self.vocab_size:,}, and these texts give {bound} {size:,} tokens",
                hint=f"set tokenizer.vocab_size to {size}",
            )
        return _with_special_tokens(tokenizer)


def _settings(vocab_size: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}


def _byte_level(tokenizer: Tokenizer, *, use_regex: bool = True) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class BPESpec(SubwordSpec, kind="bpe"):
    """Byte-pair encoding: starting from bytes, the most frequent pair of tokens is merged repeatedly

    Sennrich, Haddow and Birch 2016, arXiv 1508.07909.
    """

    min_frequency: int = field(2, "occurrences a pair needs to be merged", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        trainer = trainers.BpeTrainer(
            **_settings(self.vocab_size), min_frequency=self.min_frequency, initial_alphabet=byte_characters()
        )
        return self._train(_byte_level(Tokenizer(models.BPE())), texts, trainer)


class WordPieceSpec(SubwordSpec, kind="wordpiece"):
    """Words, split into the longest known pieces from the left; ## marks a piece that continues a word

    Schuster and Nakajima 2012. White space is not kept.
    """

    lowercase: bool = field(False, "convert texts to lower case")
    min_frequency: int = field(2, "occurrences a pair needs to be merged", ge=1)

    def make(self, texts: Iterable[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocab={}, unk_token="<unk>"))
        if self.lowercase:
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
        )
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
        texts = list(texts)
        inner = {c for text in texts for word in (text.lower() if self.lowercase else text).split() for c in word[1:]}
        # the trainer numbers ## characters in random order and breaks ties by number: listed here, the order is fixed
        settings = _settings(self.vocab_size) | {
            "special_tokens": [*SPECIAL_TOKENS, *(f"##{c}" for c in sorted(inner))]
        }
        self._train(tokenizer, texts, trainers.WordPieceTrainer(**settings, min_frequency=self.min_frequency))
        final = Tokenizer(models.WordPiece(vocab=tokenizer.get_vocab(), unk_token="<unk>"))
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(final, name, getattr(tokenizer, name))
        return _with_special_tokens(final)


class UnigramSpec(SubwordSpec, kind="unigram"):
    """The segmentation whose pieces have the highest probability together

    Kudo 2018, arXiv 1804.10959; over bytes, so that no text is unknown.
    """

    def make(self, texts: Iterable[str]) -> Tokenizer:
        trainer = trainers.UnigramTrainer(
            **_settings(self.vocab_size), initial_alphabet=byte_characters(), unk_token="<unk>"
        )
        tokenizer = self._train(_byte_level(Tokenizer(models.Unigram())), texts, trainer)
        # the trainer sums in random order and ranks bytes that never occur at random: rounding makes it reproducible
        scores = [(token, round(score, 6)) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]][
            len(SPECIAL_TOKENS) :
        ]
        lowest = min(score for _, score in scores)
        scores = [(token, lowest if len(token) == 1 and score < lowest + 0.03 else score) for token, score in scores]
        vocab = [*((token, 0.0) for token in SPECIAL_TOKENS), *sorted(scores, key=lambda pair: (-pair[1], pair[0]))]
        return _with_special_tokens(_byte_level(Tokenizer(models.Unigram(vocab, unk_id=SPECIAL_TOKENS.index("<unk>")))))


class TokenizerFileSpec(TokenizerSpec, kind="file"):
    """A tokenizer.json, without its padding, truncation and post-processor"""

    adds_tokens: ClassVar[bool] = False
    path: str = field(..., "the tokenizer.json", min_length=1)

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        try:
            data = read_bytes(Path(self.path), MAX_TOKENIZER_BYTES, error=DataSizeError)
        except (OSError, ValueError) as error:
            if isinstance(error, DataSizeError):
                raise
            raise DataFileError(f"cannot read {self.path}: {getattr(error, 'strerror', error)}") from None
        tokenizer = parse_tokenizer(data, self.path)
        tokenizer.encode_special_tokens = True
        return _remove_processing(tokenizer)


class CheckpointTokenizerSpec(TokenizerSpec, kind="checkpoint"):
    """The tokenizer of the checkpoint that the run is initialized from"""

    adds_tokens: ClassVar[bool] = False
    from_checkpoint: ClassVar[bool] = True

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        raise TokenizerError("there is no checkpoint to take a tokenizer from", hint="set init_from to a checkpoint")
