"""Greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.generate.decoding import TokenByTokenSpec


class GreedySpec(TokenByTokenSpec, kind="greedy"):
    """argmax_v p(v | x_<t), the most probable token at each step"""

    def next_tokens(self, logits_BV: Tensor, rng: Sequence[torch.Generator]) -> Tensor:
        return logits_BV.argmax(dim=-1)
