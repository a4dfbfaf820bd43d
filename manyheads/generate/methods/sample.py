"""Sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.decoding import TokenByTokenSpec


class SampleSpec(TokenByTokenSpec, kind="sample"):
    """v ~ softmax(z), where processors such as temperature, top-k and top-p have changed the logits z

    Each row has its own generator, so the samples of a sequence do not depend on its batch.
    """

    do_sample: ClassVar[bool] = True

    def next_tokens(self, logits_BV: Tensor, rng: Sequence[torch.Generator]) -> Tensor:
        probabilities = logits_BV.softmax(dim=-1, dtype=torch.promote_types(logits_BV.dtype, torch.float32))
        pairs = zip(probabilities, rng, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in pairs])
