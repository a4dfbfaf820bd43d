"""Renormalisation of filtered log-probabilities."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class RenormalizeSpec(FilterSpec, kind="renormalize"):
    """log softmax(z) after all other filters, which changes the scores of a beam search"""

    selected_by: ClassVar[tuple[str, object]] = ("renormalize_logits", False)
    order: ClassVar[int] = 200

    renormalize_logits: bool = field(True, "whether to renormalise")

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV.log_softmax(dim=-1) if self.renormalize_logits else logits_BV
