"""Metrics of language models: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from manyheads.metrics.metric import register_metric


@dataclass(frozen=True)
class LogLikelihood:
    """−Σ ln p over the tokens of some texts, in nats, and the size of these texts."""

    nats: float
    tokens: int
    characters: int
    bytes: int


@register_metric("loss", "likelihood", higher_is_better=False)
def loss(texts: LogLikelihood) -> float:
    """Nats per token. Loss and perplexity depend on the tokenizer; bits per byte and nats per character do not."""
    return texts.nats / texts.tokens


@register_metric("perplexity", "likelihood", higher_is_better=False)
def perplexity(texts: LogLikelihood) -> float:
    """e^loss; infinite if it is more than the largest float, about e^709.78."""
    exponent = loss(texts)
    return math.exp(exponent) if exponent < math.log(sys.float_info.max) else math.inf


@register_metric("bits_per_byte", "likelihood", higher_is_better=False)
def bits_per_byte(texts: LogLikelihood) -> float:
    """−Σ log₂ p per byte of UTF-8."""
    return texts.nats / math.log(2) / texts.bytes


@register_metric("nats_per_character", "likelihood", higher_is_better=False)
def nats_per_character(texts: LogLikelihood) -> float:
    """−Σ ln p per character."""
    return texts.nats / texts.characters
