"""Min-p sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class MinPSpec(FilterSpec, kind="min-p"):
    """−∞ for tokens less probable than m times the most probable one

    Nguyen et al. 2024, arXiv 2407.01082.
    """

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 130

    min_p: float = field(0.0, "m", gt=0, le=1)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        probabilities_BV = logits_BV.softmax(dim=-1)
        least_B1 = self.min_p * probabilities_BV.max(dim=-1, keepdim=True).values
        return logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
