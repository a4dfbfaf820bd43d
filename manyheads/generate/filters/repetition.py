"""The repetition penalty."""

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

    order: ClassVar[int] = 20

    repetition_penalty: float = field(1.0, "θ; above 1 makes repetition less probable", ge=0.01, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        seen_BV = token_counts(context.tokens, logits_BV.shape[1]) > 0
        changed = torch.where(logits_BV > 0, logits_BV / self.repetition_penalty, logits_BV * self.repetition_penalty)
        return torch.where(seen_BV, changed, logits_BV)
