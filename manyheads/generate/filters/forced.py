"""Tokens that are forced at the beginning or at the end."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, keep_only
from manyheads.spec import field


class ForcedBosSpec(FilterSpec, kind="forced-bos"):
    """Only these tokens after a single first token, such as the decoder_start_token_id"""

    order: ClassVar[int] = 45
    forces_bos: ClassVar[bool] = True

    forced_bos_token_id: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        is_second_B = (context.tokens >= 0).sum(dim=1) == 1
        if not is_second_B.any():
            return logits_BV
        return torch.where(is_second_B[:, None], keep_only(self.forced_bos_token_id, logits_BV), logits_BV)


class ForcedEosSpec(FilterSpec, kind="forced-eos"):
    """Only these tokens at max_new_tokens"""

    order: ClassVar[int] = 46

    forced_eos_token_id: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return keep_only(self.forced_eos_token_id, logits_BV) if context.remaining == 1 else logits_BV
