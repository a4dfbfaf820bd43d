"""Processors that shape the distribution that is sampled from."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.logits_processor import LogitsProcessorContext, LogitsProcessorSpec
from manyheads.spec import field


class TemperatureSpec(LogitsProcessorSpec, kind="temperature"):
    """z / T; the setting temperature = 0 is greedy decoding, without a division"""

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 100

    temperature: float = field(
        0.0, "T, the temperature; sampling approaches greedy decoding towards 0", ge=1e-6, le=1e6
    )

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        return logits_BV / self.temperature


class TopKSpec(LogitsProcessorSpec, kind="top-k"):
    """−∞ for all but the k most probable tokens, and those as probable as the last of them

    Fan et al. 2018, arXiv 1805.04833, section 5.4.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 110

    top_k: int = field(0, "k", ge=1)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        least_B1 = logits_BV.topk(min(self.top_k, logits_BV.shape[1])).values[:, -1:]
        return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


class TopPSpec(LogitsProcessorSpec, kind="top-p"):
    """−∞ for all but the smallest set of most probable tokens whose probabilities sum to at least p

    Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 120

    top_p: float = field(1.0, "p", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        sorted_BV, index_BV = logits_BV.sort(descending=True)
        return keep_first(logits_BV, index_BV, sorted_BV.softmax(dim=-1), self.top_p)


def keep_first(logits_BV: Tensor, index_BV: Tensor, p_BV: Tensor, total: float) -> Tensor:
    """−∞ for all but the first tokens of `index_BV` whose probabilities, `p_BV` in that order, sum to `total`."""
    # a token stays if those before it do not sum to it yet, so the first always does
    outside_BV = p_BV.cumsum(dim=-1) - p_BV >= total
    outside_BV[:, 0] = False
    return logits_BV.masked_fill(outside_BV.scatter(1, index_BV, outside_BV), -torch.inf)


class MinPSpec(LogitsProcessorSpec, kind="min-p"):
    """−∞ for tokens less probable than m times the most probable one

    Nguyen et al. 2024, arXiv 2407.01082.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 130

    min_p: float = field(0.0, "m", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        probabilities_BV = logits_BV.softmax(dim=-1)
        least_B1 = self.min_p * probabilities_BV.max(dim=-1, keepdim=True).values
        return logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)


class TypicalSpec(LogitsProcessorSpec, kind="typical"):
    """−∞ for all but the smallest set of tokens with −log p nearest to the entropy whose probabilities sum to τ

    Meister et al. 2023, arXiv 2202.00666.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 140

    typical_p: float = field(1.0, "τ", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        logp_BV = logits_BV.log_softmax(dim=-1)
        p_BV = logp_BV.exp()
        entropy_B1 = -(p_BV * logp_BV).nansum(dim=-1, keepdim=True)  # 0 · log 0 = 0
        index_BV = (-logp_BV - entropy_B1).abs().argsort(dim=-1)
        return keep_first(logits_BV, index_BV, p_BV.gather(1, index_BV), self.typical_p)
