"""Biases of tokens and of token sequences."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from manyheads.errors import OutOfRangeError, WrongTypeError
from manyheads.generate.filter import FilterContext, FilterSpec, check_tokens
from manyheads.spec import field, quote

Lists = Field(strict=False)  # TOML and JSON have lists, not tuples
Ids = Annotated[tuple[int, ...], Lists]
BiasedIds = Annotated[tuple[Ids, float], Lists]
MAX_SEQUENCES, MAX_TOKENS = 100_000, 1_000_000  # tokens of all sequences together
MAX_BIAS = 1e30  # which float32 has room for


class SequencesFilter(FilterSpec):
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

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
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


class SequenceBiasSpec(SequencesFilter, kind="sequence-bias"):
    """z + b for the last token of each sequence, where the tokens before it are the last tokens so far"""

    order: ClassVar[int] = 10

    sequence_bias: tuple[BiasedIds, ...] = field((), "sequences of token ids, each with its b", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return self.sequence_bias


class LogitBiasSpec(SequencesFilter, kind="logit-bias"):
    """z + b for these tokens"""

    order: ClassVar[int] = 11

    logit_bias: dict[Annotated[int, Lists], float] = field({}, "b by token id", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return tuple(((token,), bias) for token, bias in self.logit_bias.items())
