"""Processors that make repetition less probable, or impossible."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.logits_processor import LogitsProcessorContext, LogitsProcessorSpec, token_counts
from manyheads.spec import field


class RepetitionSpec(LogitsProcessorSpec, kind="repetition"):
    """z / θ if z > 0, else z · θ, for the logits z of tokens that are in the prompt or were generated

    Keskar et al. 2019 (CTRL), arXiv 1909.05858, section 4.1, with the sign rule of transformers.
    """

    order: ClassVar[int] = 20

    repetition_penalty: float = field(1.0, "θ; above 1 makes repetition less probable", ge=0.01, le=100)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        seen_BV = token_counts(context.tokens, logits_BV.shape[1]) > 0
        changed = torch.where(logits_BV > 0, logits_BV / self.repetition_penalty, logits_BV * self.repetition_penalty)
        return torch.where(seen_BV, changed, logits_BV)


class PresenceSpec(LogitsProcessorSpec, kind="presence"):
    """z − p for the logits z of tokens that were generated, however often; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    order: ClassVar[int] = 21

    presence_penalty: float = field(0.0, "p; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return logits_BV - self.presence_penalty * (token_counts(context.generated_tokens, logits_BV.shape[1]) > 0)


class FrequencySpec(LogitsProcessorSpec, kind="frequency"):
    """z − f · c for the logits z of tokens that were generated c times; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    order: ClassVar[int] = 22

    frequency_penalty: float = field(0.0, "f; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return logits_BV - self.frequency_penalty * token_counts(context.generated_tokens, logits_BV.shape[1])


class NoRepeatNgramSpec(LogitsProcessorSpec, kind="no-repeat-ngram"):
    """−∞ for a token that would complete an n-gram that is in the prompt or was generated

    Paulus et al. 2018, arXiv 1705.04304, section 2.5.
    """

    order: ClassVar[int] = 30

    no_repeat_ngram_size: int = field(0, "n", ge=1, le=1024)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
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
