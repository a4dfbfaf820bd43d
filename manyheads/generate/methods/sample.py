"""Sampling with a temperature."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.decoding import DecodingSpec, GenerationConfig, Generators, generate_token_by_token
from manyheads.model.build import Model
from manyheads.parts.inputs import Inputs
from manyheads.spec import field


class SampleSpec(DecodingSpec, kind="sample"):
    """v ~ softmax(logits / T)

    Each row has its own generator, so the samples of a sequence do not depend on its batch.
    """

    selected_by: ClassVar[tuple[str, float]] = ("temperature", 0)

    temperature: float = field(
        1.0, "T, the temperature; sampling approaches greedy decoding towards 0", ge=1e-6, le=1e6
    )

    def generate(
        self, model: Model, prompt: Inputs, source: Inputs | None, *, config: GenerationConfig, rng: Generators
    ) -> list[list[int]]:
        def choose(logits_BV: Tensor, rows: list[int]) -> Tensor:
            probabilities = torch.softmax(logits_BV.float() / self.temperature, dim=-1)
            draws = [torch.multinomial(row, 1, generator=rng[i]) for row, i in zip(probabilities, rows, strict=True)]
            return torch.cat(draws)

        return generate_token_by_token(model, prompt, source, config=config, choose=choose)
