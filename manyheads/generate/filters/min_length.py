"""The minimum length of a generated text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, remove
from manyheads.spec import field


class MinNewTokensSpec(FilterSpec, kind="min-new-tokens"):
    """−∞ for eos tokens until n tokens are generated"""

    order: ClassVar[int] = 40

    min_new_tokens: int = field(0, "n", ge=1)

    def min_new_tokens_after(self, length: int) -> int:
        return self.min_new_tokens

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV if context.num_generated >= self.min_new_tokens else remove(context.eos_token_id, logits_BV)


class MinLengthSpec(FilterSpec, kind="min-length"):
    """−∞ for eos tokens until prompt and generated tokens are n; of an encoder–decoder, those of the decoder"""

    order: ClassVar[int] = 39

    min_length: int = field(0, "n", ge=1)

    def min_new_tokens_after(self, length: int) -> int:
        return self.min_length - length

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        is_short_B1 = ((context.tokens >= 0).sum(dim=1) < self.min_length)[:, None]
        return torch.where(is_short_B1, remove(context.eos_token_id, logits_BV), logits_BV)
