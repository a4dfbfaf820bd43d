"""How well a text was foreseen: loss, perplexity, bits a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreseen:
    """−Σ ln p over what was asked, in nats, and how much text that was."""

    nats: float
    tokens: int
    characters: int
    bytes: int

    def scores(self) -> dict[str, float]:
        """Only what counts characters or bytes is comparable between tokenizers."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
            "nats_per_character": self.nats / self.characters,
        }


def perplexity(loss: float) -> float:
    """e^loss, of a loss in nats a token; of one beyond all numbers, the largest."""
    return math.exp(min(loss, 700.0))
