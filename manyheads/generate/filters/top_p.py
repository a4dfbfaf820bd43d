"""Nucleus sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class TopPSpec(FilterSpec, kind="top-p"):
    """−∞ for all but the smallest set of most probable tokens whose probabilities sum to at least p

    Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 120

    top_p: float = field(1.0, "p", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        sorted_BV, index_BV = logits_BV.sort(descending=True)
        probabilities_BV = sorted_BV.softmax(dim=-1)
        # a token stays if those before it do not sum to p yet, so the first always does
        outside_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV >= self.top_p
        outside_BV[:, 0] = False
        return logits_BV.masked_fill(outside_BV.scatter(1, index_BV, outside_BV), -torch.inf)
