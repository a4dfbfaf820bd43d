"""Renormalisation of filtered log-probabilities."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class RenormalizeSpec(FilterSpec, kind="renormalize"):
    """log softmax(z) after all other filters, which changes the scores of a beam search"""

    order: ClassVar[int] = 200

    renormalize_logits: bool = field(False, "whether to renormalise")

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        if not self.renormalize_logits:
            return logits_BV
        # a row without a possible token stays so
        return logits_BV.log_softmax(dim=-1).masked_fill(logits_BV == -torch.inf, -torch.inf)
