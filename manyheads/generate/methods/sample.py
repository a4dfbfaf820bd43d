"""Sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.decoding import DecodingSpec, DecodingSteps, GenerationBatch, generate_token_by_token


class SampleSpec(DecodingSpec, kind="sample"):
    """v ~ softmax(z), where processors such as temperature, top-k and top-p have changed the logits z

    Each row has its own generator, so the samples of a sequence do not depend on its batch.
    """

    do_sample: ClassVar[bool] = True
    supports_prefix_cache: ClassVar[bool] = True

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        def choose(logits_BV: Tensor, prompt_indices: list[int]) -> Tensor:
            probabilities = logits_BV.softmax(dim=-1, dtype=torch.promote_types(logits_BV.dtype, torch.float32))
            pairs = zip(probabilities, prompt_indices, strict=True)
            return torch.cat([torch.multinomial(row, 1, generator=batch.rng[i]) for row, i in pairs])

        return generate_token_by_token(batch, choose)
