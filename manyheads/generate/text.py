"""Generated tokens as text: pieces that are final, stop strings, and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from manyheads.generate.vocabulary import TokenDecoder

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 character is decoded to


@dataclass(frozen=True)
class GeneratedText:
    """One generated text. It equals what the tokenizer decodes, up to a stop string or the eos token."""

    text: str
    token_ids: list[int]  # without the eos token
    finish_reason: str  # "stop" for an eos token, a stop string or a complete grammar; else "length"
    stop: str | None = None  # the stop string that ended it
    score: float | None = None  # of a search
    logprobs: list[float] | None = None  # log p of each token, before logits processors and temperature
    top_logprobs: list[list[tuple[str, float]]] | None = None  # the most probable tokens of each step
    note: str | None = None  # what to know about its length

    def __str__(self) -> str:
        return self.text


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """The first stop string in a text, and where it begins, which is not before `start`."""
    matches = [(text.index(stop, start), stop) for stop in stops if text.find(stop, start) >= 0]
    return min(matches, default=None, key=lambda match: (match[0], -len(match[1])))


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """The number of last characters that may be the beginning of a stop string."""
    lengths = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


@dataclass(frozen=True)
class PartialText:
    """The text of some tokens. It does not change: the text with another token is another object.

    A new token can change only the text of the last ones, so only these are decoded again. They follow a token as
    their context, because some decoders treat the first token of a text in another way.
    """

    decode: Callable[[Sequence[int]], str]
    decoder: TokenDecoder
    start: str = ""  # the text of all tokens before those of `end`
    end: str = ""
    tokens: tuple[int, ...] = ()  # those of `end`, after the context if there is one
    context: str = ""  # what the decoder makes of the context alone
    window: int = 32  # tokens that are decoded again, at most, unless they are parts of one character

    @property
    def text(self) -> str:
        return self.start + self.end

    def after(self, token: int) -> PartialText:
        """The text with one more token."""
        is_long = self.decoder.is_local and self.tokens and len(self.tokens) % self.window == 0
        old = self.advance_window() if is_long else self
        tokens = (*old.tokens, token)
        return replace(old, tokens=tokens, end=self.decode(tokens)[len(old.context) :])

    def advance_window(self) -> PartialText:
        """The same text, with the last token that ends its characters as the context of the next ones."""
        for end in range(len(self.tokens), 1, -1):
            last, rest = self.tokens[end - 1], self.tokens[end - 1 :]
            if (
                self.decoder.is_closed(last)
                and (last_text := self.decode([last]))
                and not last_text.endswith(REPLACEMENT)
            ):
                after = self.decode(rest)[len(last_text) :]
                start = self.text[: len(self.text) - len(after)]
                return replace(self, start=start, end=after, tokens=rest, context=last_text)
        return self

    @property
    def num_final_chars(self) -> int:
        """The number of first characters that no later token changes."""
        end = len(self.tokens) if self.decoder.is_local else 0
        while end and not self.decoder.is_closed(self.tokens[end - 1]):
            end -= 1
        text = self.end if end == len(self.tokens) else self.decode(self.tokens[:end])[len(self.context) :]
        return len((self.start + text).rstrip(REPLACEMENT))

    def find_stop(self, stops: Sequence[str]) -> tuple[int, str] | None:
        """The first stop string, and where it begins; not in `start`, where an earlier text would have had it."""
        return find_stop(self.text, stops, max(0, len(self.start) + 1 - max(map(len, stops), default=0)))


@dataclass
class StopStrings:
    """Finds stop strings in sequences. A step adds a token to each, so only the texts of the last step are kept."""

    empty: PartialText
    stops: Sequence[str]
    length: int = 0  # of the sequences of the last step
    texts: dict[tuple[int, ...], PartialText] = field(default_factory=dict)

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a stop string."""
        key = tuple(tokens)
        if len(key) != self.length:
            self.length, before = len(key), len(key) - 1
            self.texts = {prefix: text for prefix, text in self.texts.items() if len(prefix) == before}
        old = self.texts.get(key[:-1]) or reduce(PartialText.after, key[:-1], self.empty)
        new = self.texts[key] = old.after(key[-1])
        return new.find_stop(self.stops) is not None


@dataclass
class TextStreamer:
    """The text of a growing sequence, in pieces: never half a character, never a part of a stop string."""

    text: PartialText
    stops: Sequence[str] = ()
    num_sent: int = 0  # characters in the pieces so far

    def push(self, token: int) -> str:
        """Adds a token; returns the characters that became final."""
        self.text = self.text.after(token)
        if match := self.text.find_stop(self.stops):
            return self.send(self.text.text[: match[0]])
        text = self.text.text[: self.text.num_final_chars]
        return self.send(text[: len(text) - possible_stop(text, self.stops)])

    def send(self, text: str) -> str:
        """The characters of a text, the whole one in the end, that were not sent yet."""
        piece, self.num_sent = text[self.num_sent :], max(self.num_sent, len(text))
        return piece
