"""Top-k sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class TopKSpec(FilterSpec, kind="top-k"):
    """−∞ for all but the k most probable tokens, and those as probable as the last of them

    Fan et al. 2018, arXiv 1805.04833, section 5.4.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 110

    top_k: int = field(0, "k", ge=1)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        least_B1 = logits_BV.topk(min(self.top_k, logits_BV.shape[1])).values[:, -1:]
        return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
