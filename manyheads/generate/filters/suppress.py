"""Tokens that are never generated, or never first."""

from __future__ import annotations

from typing import ClassVar

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
    """−∞ for these tokens at the first step"""

    order: ClassVar[int] = 62

    begin_suppress_tokens: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV if context.num_generated else remove(self.begin_suppress_tokens, logits_BV)
