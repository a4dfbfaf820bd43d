"""Penalties of tokens and n-grams that the text already has."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, token_counts
from manyheads.spec import field


class RepetitionSpec(FilterSpec, kind="repetition"):
    """z / θ if z > 0, else z · θ, for the logits z of tokens that are in the prompt or were generated

    Keskar et al. 2019 (CTRL), arXiv 1909.05858, section 4.1, with the sign rule of transformers.
    """

    selected_by: ClassVar[tuple[str, object]] = ("repetition_penalty", 1.0)
    order: ClassVar[int] = 20

    repetition_penalty: float = field(1.2, "θ; above 1 makes repetition less probable", ge=0.01, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        seen_BV = token_counts(context.tokens, logits_BV.shape[1]) > 0
        changed = torch.where(logits_BV > 0, logits_BV / self.repetition_penalty, logits_BV * self.repetition_penalty)
        return torch.where(seen_BV, changed, logits_BV)


class PresenceSpec(FilterSpec, kind="presence"):
    """z − p for the logits z of tokens that were generated, however often; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    selected_by: ClassVar[tuple[str, object]] = ("presence_penalty", 0.0)
    order: ClassVar[int] = 21

    presence_penalty: float = field(0.5, "p; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV - self.presence_penalty * (token_counts(context.generated, logits_BV.shape[1]) > 0)


class FrequencySpec(FilterSpec, kind="frequency"):
    """z − f · c for the logits z of tokens that were generated c times; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    selected_by: ClassVar[tuple[str, object]] = ("frequency_penalty", 0.0)
    order: ClassVar[int] = 22

    frequency_penalty: float = field(0.5, "f; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV - self.frequency_penalty * token_counts(context.generated, logits_BV.shape[1])


class NoRepeatNgramSpec(FilterSpec, kind="no-repeat-ngram"):
    """−∞ for a token that would complete an n-gram that is in the prompt or was generated

    Paulus et al. 2018, arXiv 1705.04304, section 2.5.
    """

    selected_by: ClassVar[tuple[str, object]] = ("no_repeat_ngram_size", 0)
    order: ClassVar[int] = 30

    no_repeat_ngram_size: int = field(3, "n", ge=1, le=1024)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        n, tokens_BL = self.no_repeat_ngram_size, context.tokens
        if tokens_BL.shape[1] < n:
            return logits_BV
        ngrams_BWN = tokens_BL.unfold(1, n, 1)
        last_B1N = tokens_BL[:, None, tokens_BL.shape[1] - n + 1 :]
        repeated_BW = (ngrams_BWN[..., :-1] == last_B1N).all(dim=-1) & (ngrams_BWN >= 0).all(dim=-1)
        rows, windows = repeated_BW.nonzero(as_tuple=True)
        logits_BV = logits_BV.clone()
        logits_BV[rows, ngrams_BWN[rows, windows, -1]] = -torch.inf
        return logits_BV
