"""Scores given texts: log p of each token after those before it, in strided windows beyond the model's length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import InputLengthError, UnsupportedError, UsageError
from manyheads.generate.decoding import log_probabilities
from manyheads.metrics.likelihood import LogLikelihood, perplexity
from manyheads.model.builder import Model
from manyheads.model.finite import check_finite
from manyheads.parts.inputs import BATCH_TOKENS, Inputs, check_token_ids, group_by_length, pad_rows
from manyheads.spec import MAX_COUNT, quote

BATCH_LOGITS = 1 << 25  # maximum number of logits per step, if a row has not more


@dataclass(frozen=True)
class TokenRow:
    """The tokens that a model reads for one text, and the source of an encoder–decoder."""

    ids: list[int]
    first: int = 0  # the index of the first token of the text; those before it are its context
    pieces: Sequence[str] = ()  # the characters of the text that each of its tokens stands for
    source: list[int] | None = None

    @classmethod
    def from_encoding(cls, encoding: Any, context: str, text: str) -> TokenRow:
        """The row of a text that follows a context, from the tokenizer's encoding of both together.

        A token of the last characters of the context and the first of the text belongs to the text; tokens that the
        tokenizer adds before the text do not.
        """
        ends = [end - len(context) for _, end in encoding.offsets]
        is_added = encoding.special_tokens_mask
        text_indices = [i for i, end in enumerate(ends) if not is_added[i] and (end > 0 or not context)]
        if not text_indices:
            return cls(encoding.ids, len(encoding.ids))
        ends[text_indices[-1]], last, pieces = len(text), 0, []
        for i in range(text_indices[0], len(ends)):
            stop = last if is_added[i] else max(last, ends[i])
            pieces.append(text[last:stop])
            last = stop
        return cls(encoding.ids, text_indices[0], pieces)

    def to_scored_text(self, text: str, logprobs: Sequence[float | None], name: Callable[[int], str]) -> ScoredText:
        """The result; `name` gives the text of one token."""
        ids = self.ids[self.first :]
        columns = zip(map(name, ids), ids, self.pieces or [""] * len(ids), logprobs, strict=True)
        return ScoredText(text, tuple(ScoredToken(*values) for values in columns))


@dataclass(frozen=True)
class ScoredToken:
    """A token of a scored text."""

    token: str  # as the tokenizer decodes it alone, or its name
    id: int
    text: str  # the characters of the text that it stands for; "" for a token that the tokenizer adds
    logprob: float | None  # ln p of the token after all before it; None for the first if nothing is before it

    @property
    def surprisal(self) -> float | None:
        """−log₂ p, in bits."""
        return None if self.logprob is None else -self.logprob / math.log(2)


@dataclass(frozen=True)
class ScoredText:
    """A text with the log-probability of each of its tokens."""

    text: str
    tokens: tuple[ScoredToken, ...]

    @property
    def count(self) -> int:
        """The number of tokens that have a log-probability."""
        return sum(token.logprob is not None for token in self.tokens)

    @property
    def logprob(self) -> float:
        """ln p of the text after its context, or for its source: the sum over its tokens."""
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def perplexity(self) -> float:
        """e to the mean of −ln p per token."""
        return perplexity(LogLikelihood(-self.logprob, self.count, len(self.text), len(self.text.encode())))

    @property
    def bits_per_token(self) -> float:
        """The mean surprisal."""
        return -self.logprob / self.count / math.log(2)


def windows(count: int, size: int, stride: int) -> Iterator[tuple[slice, int]]:
    """Yields slices of `count` tokens, each with the index of the first token that no slice before it predicts.

    A model reads all tokens of a slice but the last, at most `size`, and predicts all but the first. Each slice starts
    `stride` tokens after the one before it, so what it is the first to predict follows more than size − stride tokens.
    """
    first = 1
    for start in range(0, count - 1, stride):
        stop = min(start + size + 1, count)
        yield slice(start, stop), first
        if stop == count:
            return
        first = stop


def score_rows(
    model: Model, rows: Sequence[TokenRow], *, window: int | None = None, stride: int | None = None
) -> list[list[float | None]]:
    """ln p of each token of the text in each row; None for the first token of a row. Rows share batches.

    A row longer than `window` tokens is read in windows, each `stride` tokens after the last, by default half of it.
    """
    check_can_score(model)
    stride = window_stride(window, stride)
    for index, row in enumerate(rows):
        check_row(model, row, index)
    logprobs: list[list[float | None]] = [[None] * len(row.ids) for row in rows]
    parts: list[tuple[int, slice, int]] = []  # (row, its tokens, the first that is scored)
    for index, row in enumerate(rows):
        for part, first in windows(len(row.ids), window or len(row.ids), stride or len(row.ids)):
            if (first := max(first, row.first)) < part.stop:
                parts.append((index, part, first))
    for batch in batches(model, [(part.stop - part.start - 1, rows[i].source) for i, part, _ in parts]):
        batch_parts = [parts[k] for k in batch]
        compute = partial(
            batch_logprobs,
            model,
            [rows[i].ids[part] for i, part, _ in batch_parts],
            [source for i, _, _ in batch_parts if (source := rows[i].source) is not None],
        )
        for (i, part, first), values in zip(batch_parts, check_finite(model, compute(), compute).tolist(), strict=True):
            logprobs[i][first : part.stop] = values[first - part.start - 1 : part.stop - part.start - 1]
    return [values[row.first :] for row, values in zip(rows, logprobs, strict=True)]


@torch.no_grad()
def batch_logprobs(model: Model, rows: Sequence[list[int]], sources: Sequence[list[int]]) -> Tensor:
    """ln p of all tokens but the first of each row, B×L, 0 after the end of a row. A long row is read in steps."""
    device = next(model.parameters()).device
    inputs, targets = pad_rows([row[:-1] for row in rows]).to(device), pad_rows([row[1:] for row in rows]).to(device)
    state: Any = model.start(pad_rows(sources).to(device) if sources else None, capacity=inputs.length)
    steps, length = list[Tensor](), max(1, max_tokens(model) // len(rows))
    for start in range(0, inputs.length, length):
        step = slice(start, start + length)
        mask = None if inputs.padding_mask is None else inputs.padding_mask[:, step]
        logits, state = model.step(Inputs(inputs.tokens[:, step], padding_mask=mask), state)
        logp = log_probabilities(logits).gather(2, targets.tokens[:, step, None])[..., 0]
        steps.append(logp if mask is None else logp.masked_fill(mask, 0.0))
    return torch.cat(steps, dim=1)


def batches(model: Model, sizes: Sequence[tuple[int, Sequence[int] | None]]) -> Iterator[list[int]]:
    """Groups rows, given by their length and source. They share a length if the RoPE frequencies depend on it."""
    lengths = [max(length, len(source or ())) for length, source in sizes]
    keys = [length for length, _ in sizes] if model.spec.needs_final_length else None
    return group_by_length(lengths, max_tokens(model), keys=keys)


def max_tokens(model: Model) -> int:
    """Tokens per step, so that their logits fit into memory."""
    assert isinstance(model.spec.vocab, int)
    return min(BATCH_TOKENS, max(1, BATCH_LOGITS // model.spec.vocab))


def check_can_score(model: Model) -> None:
    if not model.can_generate or model.spec.head.output != "tokens":
        spec = model.spec
        raise UnsupportedError(
            f"a text is scored by a model that predicts each token from those before it; this model is "
            f"{spec.architecture} with the head '{spec.head.kind}'"
        )


def window_stride(window: int | None, stride: int | None) -> int | None:
    """The tokens between windows, by default half a window; None if a text of any length is read at once."""
    largest = MAX_COUNT if window is None else window
    if stride is not None and (type(stride) is not int or not 1 <= stride <= largest):
        raise UsageError(f"stride is {quote(stride)}, expected an integer from 1 to the window's {largest:,} tokens")
    return None if window is None else stride or max(1, window // 2)


def check_row(model: Model, row: TokenRow, index: int) -> None:
    assert isinstance(model.spec.vocab, int)
    if len(row.ids) <= row.first:
        raise InputLengthError("the text is empty; give at least one token", index)
    if len(row.ids) < 2:
        raise InputLengthError(
            "the text has one token and nothing is before it, so it has no probability", index, hint="give a context"
        )
    check_token_ids(row.ids, model.spec.vocab, index)
