"""Generated tokens as text: pieces that are final, stop strings, and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 character is decoded to


@dataclass(frozen=True)
class GeneratedText:
    """One generated text. It equals what the tokenizer decodes, up to a stop string or the eos token."""

    text: str
    tokens: list[int]  # without the eos token
    finish_reason: str  # "stop" for an eos token, a stop string or a complete grammar; else "length"
    stop: str | None = None  # the stop string that ended it
    score: float | None = None  # of a search
    logprobs: list[float] | None = None  # log p of each token, before filters and temperature
    top_logprobs: list[list[tuple[str, float]]] | None = None  # the most probable tokens of each step
    note: str | None = None  # what to know about its length

    def __str__(self) -> str:
        return self.text


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string in a text, and where it begins."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found, default=None, key=lambda one: (one[0], -len(one[1])))


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """The number of last characters that may be the beginning of a stop string."""
    lengths = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


@dataclass(frozen=True)
class Detokenizer:
    """How a tokenizer decodes a growing sequence: what later tokens may still change."""

    decode: Callable[[Sequence[int]], str]
    lookback: int = 0  # number of last characters
    byte_ids: frozenset[int] = frozenset()  # tokens of single bytes, of which a whole run is decoded together

    @classmethod
    def of(cls, tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> Detokenizer:
        state = tokenizer.decoder.__getstate__() if getattr(tokenizer, "decoder", None) is not None else b""
        # a WordPiece decoder joins punctuation and contractions to the word before, as "do n't" to "don't"
        lookback = 8 if any(name in state for name in (b'"WordPiece"', b'"CTC"', b'"BPEDecoder"')) else 0
        names = (f"<0x{byte:02X}>" for byte in range(256)) if b'"ByteFallback"' in state else ()
        ids = (tokenizer.token_to_id(name) for name in names)
        return cls(decode, lookback, frozenset(token for token in ids if token is not None))

    def final_text(self, tokens: Sequence[int]) -> str:
        """The text that no later token changes."""
        end = len(tokens)
        while end and tokens[end - 1] in self.byte_ids:
            end -= 1
        text = self.decode(tokens[:end]).rstrip(REPLACEMENT)
        return text[: max(0, len(text) - self.lookback)]


@dataclass
class TextStream:
    """The text of a growing sequence, in pieces: never half a character, never a part of a stop string."""

    detokenizer: Detokenizer
    stops: Sequence[str] = ()
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # characters in the pieces so far

    def push(self, token: int) -> str:
        """Adds a token; returns the characters that became final."""
        self.tokens.append(token)
        if self.stops and (found := find_stop(text := self.detokenizer.decode(self.tokens), self.stops)):
            return self.send(text[: found[0]])
        text = self.detokenizer.final_text(self.tokens)
        return self.send(text[: len(text) - possible_stop(text, self.stops)])

    def send(self, text: str) -> str:
        """The characters of a text, the whole one in the end, that were not sent yet."""
        piece, self.sent = text[self.sent :], max(self.sent, len(text))
        return piece
