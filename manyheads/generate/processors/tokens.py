"""Processors that forbid, force or favour tokens and sequences of tokens."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from manyheads.errors import CheckpointTokenizerError, OutOfRangeError, UnsupportedError, WrongTypeError
from manyheads.files.tokenizer import encode_texts
from manyheads.generate.logits_processor import (
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsProcessorSpec,
    check_tokens,
    keep_only,
    remove,
)
from manyheads.generate.vocabulary import Vocabulary
from manyheads.spec import field, quote


class SuppressTokensSpec(LogitsProcessorSpec, kind="suppress-tokens"):
    """−∞ for these tokens"""

    order: ClassVar[int] = 61

    suppress_tokens: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return remove(self.suppress_tokens, logits_BV)


class BeginSuppressTokensSpec(LogitsProcessorSpec, kind="begin-suppress-tokens"):
    """−∞ for these tokens at the first step, or at the second if forced_bos_token_id forces the first"""

    order: ClassVar[int] = 62

    begin_suppress_tokens: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        length_B = (context.tokens >= 0).sum(dim=1) - context.num_generated
        is_first_B = (length_B == 1).long() * context.forces_bos == context.num_generated
        return torch.where(is_first_B[:, None], remove(self.begin_suppress_tokens, logits_BV), logits_BV)


class ForcedBosSpec(LogitsProcessorSpec, kind="forced-bos"):
    """Only these tokens after a single first token, such as the decoder_start_token_id"""

    order: ClassVar[int] = 45
    forces_bos: ClassVar[bool] = True

    forced_bos_token_id: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        is_second_B = (context.tokens >= 0).sum(dim=1) == 1
        if not is_second_B.any():
            return logits_BV
        return torch.where(is_second_B[:, None], keep_only(self.forced_bos_token_id, logits_BV), logits_BV)


class ForcedEosSpec(LogitsProcessorSpec, kind="forced-eos"):
    """Only these tokens at max_new_tokens"""

    order: ClassVar[int] = 46

    forced_eos_token_id: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return keep_only(self.forced_eos_token_id, logits_BV) if context.remaining == 1 else logits_BV


class ForcedPrefixSpec(LogitsProcessorSpec, kind="forced-prefix"):
    """−∞ for all but one of these tokens at each of the first steps: a constrained prefix

    The logit of the token stays, so the score of a search is that of the model, among the texts with this prefix.
    """

    order: ClassVar[int] = 90

    forced_prefix_ids: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        token = self.forced_prefix_ids[context.num_generated : context.num_generated + 1]
        return logits_BV + keep_only(token, logits_BV) if token else logits_BV


class ForcedPrefixTextSpec(LogitsProcessorSpec, kind="forced-prefix-text"):
    """forced-prefix with the tokens of a text"""

    order: ClassVar[int] = 90

    forced_prefix: str = field("", "the first text that is generated", max_length=1 << 20)

    def prepare(self, vocabulary: Vocabulary) -> LogitsProcessor:
        if vocabulary.tokenizer is None:
            raise UnsupportedError(
                "forced_prefix needs a tokenizer, and this checkpoint has none; use forced_prefix_ids"
            )
        kind = CheckpointTokenizerError
        (encoding,) = encode_texts(vocabulary.tokenizer, [self.forced_prefix], kind, add_special_tokens=False)
        return ForcedPrefixSpec(forced_prefix_ids=tuple(encoding.ids)).prepare(vocabulary)


class MinNewTokensSpec(LogitsProcessorSpec, kind="min-new-tokens"):
    """−∞ for eos tokens until n tokens are generated"""

    order: ClassVar[int] = 40

    min_new_tokens: int = field(0, "n", ge=1)

    def min_new_tokens_after(self, length: int) -> int:
        return self.min_new_tokens

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return logits_BV if context.num_generated >= self.min_new_tokens else remove(context.eos_token_id, logits_BV)


class MinLengthSpec(LogitsProcessorSpec, kind="min-length"):
    """−∞ for eos tokens until prompt and generated tokens are n; of an encoder–decoder, those of the decoder"""

    order: ClassVar[int] = 39

    min_length: int = field(0, "n", ge=1)

    def min_new_tokens_after(self, length: int) -> int:
        return self.min_length - length

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        is_short_B1 = ((context.tokens >= 0).sum(dim=1) < self.min_length)[:, None]
        return torch.where(is_short_B1, remove(context.eos_token_id, logits_BV), logits_BV)


Lists = Field(strict=False)  # TOML and JSON have lists, not tuples
Ids = Annotated[tuple[int, ...], Lists]
BiasedIds = Annotated[tuple[Ids, float], Lists]
MAX_SEQUENCES, MAX_TOKENS = 100_000, 1_000_000  # tokens of all sequences together
MAX_BIAS = 1e30  # which float32 has room for


class SequencesProcessor(LogitsProcessorSpec):
    """Adds a bias to the last token of a sequence, where the tokens before it are the last tokens so far."""

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        """Sequences of token ids, one or many, each with its bias."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = sum(len(ids) for ids, _ in self.sequences)
        if len(self.sequences) > MAX_SEQUENCES or count > MAX_TOKENS:
            raise OutOfRangeError(
                f"given {len(self.sequences):,} sequences of {count:,} tokens, expected at most {MAX_SEQUENCES:,} of "
                f"{MAX_TOKENS:,}",
                (self.name,),
            )
        for ids, bias in self.sequences:
            if not ids or min(ids) < 0 or not (bias == -math.inf or abs(bias) <= MAX_BIAS):
                expected = f"expected token ids and a number up to {MAX_BIAS:g}"
                raise WrongTypeError(f"given {quote(ids)} with {bias}, {expected}", (self.name,))
        return self

    @cached_property
    def _by_prefix(self) -> dict[Ids, tuple[list[int], list[float]]]:
        """The last tokens with their biases, by the tokens before them."""
        table: dict[Ids, dict[int, float]] = {}
        for (*before, token), bias in self.sequences:
            biases = table.setdefault(tuple(before), {})
            biases[token] = biases.get(token, 0.0) + bias
        return {before: (list(biases), list(biases.values())) for before, biases in table.items()}

    @cached_property
    def _last_tokens(self) -> Ids:
        return tuple({ids[-1] for ids, _ in self.sequences})

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        check_tokens(self._last_tokens, logits_BV)
        logits_BV, table = logits_BV.clone(), self._by_prefix
        if () in table:
            add_biases(logits_BV, slice(None), *table[()])
        lengths = sorted({len(before) for before in table} - {0})
        for row, tokens in enumerate(context.tokens[:, -lengths[-1] :].tolist() if lengths else ()):
            for length in lengths:
                if ending := table.get(tuple(tokens[len(tokens) - length :])) if length <= len(tokens) else None:
                    add_biases(logits_BV, slice(row, row + 1), *ending)
        return logits_BV


def add_biases(logits_BV: Tensor, rows: slice, tokens: list[int], biases: list[float]) -> None:
    logits_BV[rows, torch.tensor(tokens, device=logits_BV.device)] += logits_BV.new_tensor(biases)


class SequenceBiasSpec(SequencesProcessor, kind="sequence-bias"):
    """z + b for the last token of each sequence, where the tokens before it are the last tokens so far"""

    order: ClassVar[int] = 10

    sequence_bias: tuple[BiasedIds, ...] = field((), "sequences of token ids, each with its b", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return self.sequence_bias


class LogitBiasSpec(SequencesProcessor, kind="logit-bias"):
    """z + b for these tokens"""

    order: ClassVar[int] = 11

    logit_bias: dict[Annotated[int, Lists], float] = field({}, "b by token id", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return tuple(((token,), bias) for token, bias in self.logit_bias.items())


class BadWordsSpec(SequencesProcessor, kind="bad-words"):
    """−∞ for the last token of each sequence, where the tokens before it are the last tokens so far"""

    order: ClassVar[int] = 35

    bad_words_ids: tuple[Ids, ...] = field((), "sequences of token ids that are never generated", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return tuple((ids, -math.inf) for ids in self.bad_words_ids)


class RenormalizeSpec(LogitsProcessorSpec, kind="renormalize"):
    """log softmax(z) after all other processors, which changes the scores of a beam search"""

    order: ClassVar[int] = 200

    renormalize_logits: bool = field(False, "whether to renormalize")

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        if not self.renormalize_logits:
            return logits_BV
        # a row without a possible token stays so
        return logits_BV.log_softmax(dim=-1).masked_fill(logits_BV == -torch.inf, -torch.inf)
