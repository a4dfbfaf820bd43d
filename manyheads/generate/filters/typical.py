"""Locally typical sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class TypicalSpec(FilterSpec, kind="typical"):
    """−∞ for all but the smallest set of tokens with −log p nearest to the entropy whose probabilities sum to τ

    Meister et al. 2023, arXiv 2202.00666.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 140

    typical_p: float = field(1.0, "τ", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        logp_BV = logits_BV.log_softmax(dim=-1)
        p_BV = logp_BV.exp()
        entropy_B1 = -(p_BV * logp_BV).nansum(dim=-1, keepdim=True)  # 0 · log 0 = 0
        index_BV = (-logp_BV - entropy_B1).abs().argsort(dim=-1)
        sorted_BV = p_BV.gather(1, index_BV)
        outside_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= self.typical_p
        outside_BV[:, 0] = False
        return logits_BV.masked_fill(outside_BV.scatter(1, index_BV, outside_BV), -torch.inf)
