"""Greedy decoding."""

from __future__ import annotations

from typing import ClassVar

from manyheads.generate.decoding import DecodingSpec, DecodingSteps, GenerationBatch, generate_token_by_token


class GreedySpec(DecodingSpec, kind="greedy"):
    """argmax_v p(v | x_<t), the most probable token at each step"""

    supports_prefix_cache: ClassVar[bool] = True

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        return generate_token_by_token(batch, lambda logits_BV, prompt_indices: logits_BV.argmax(dim=-1))
