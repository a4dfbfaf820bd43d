"""Tokens that are never generated, or never first."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, remove
from manyheads.spec import field


class SuppressTokensSpec(FilterSpec, kind="suppress-tokens"):
    """−∞ for these tokens"""

    order: ClassVar[int] = 61

    suppress_tokens: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return remove(self.suppress_tokens, logits_BV)


class BeginSuppressTokensSpec(FilterSpec, kind="begin-suppress-tokens"):
    """−∞ for these tokens at the first step, or at the second if forced_bos_token_id forces the first"""

    order: ClassVar[int] = 62

    begin_suppress_tokens: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        length_B = (context.tokens >= 0).sum(dim=1) - context.num_generated
        is_first_B = (length_B == 1).long() * context.forces_bos == context.num_generated
        return torch.where(is_first_B[:, None], remove(self.begin_suppress_tokens, logits_BV), logits_BV)
