"""Greedy decoding."""

from __future__ import annotations

from manyheads.generate.decoding import DecodingSpec, GenerationConfig, Generators, generate_token_by_token
from manyheads.model.build import Model
from manyheads.parts.inputs import Inputs


class GreedySpec(DecodingSpec, kind="greedy"):
    """argmax_v p(v | x_<t), the most probable token at each step"""

    def generate(
        self, model: Model, prompt: Inputs, source: Inputs | None, *, config: GenerationConfig, rng: Generators
    ) -> list[list[int]]:
        return generate_token_by_token(
            model, prompt, source, config=config, choose=lambda logits_BV, rows: logits_BV.argmax(dim=-1)
        )
