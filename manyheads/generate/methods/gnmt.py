"""Beam search with the length and coverage penalties of Wu et al. 2016."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from manyheads.generate.decoding import GenerationBatch, RunningSequences
from manyheads.generate.methods.beam import BeamSearch, BeamSearchSpec
from manyheads.model.recording import last_cross_attention, record
from manyheads.spec import field

if TYPE_CHECKING:
    from manyheads.generate.config import GenerationConfig


class GnmtBeamSpec(BeamSearchSpec, kind="gnmt-beam"):
    """argmax_y log p(y | x) / lp(|y|) + β Σ_i log min(Σ_t a_ti, 1) with lp(n) = ((5 + n) / 6)^α over `num_beams` beams

    Wu et al. 2016, arXiv 1609.08144, equation 14, without pruning, as in Tensor2Tensor and JoeyNMT. n includes the eos
    token; α = 0.6 as in Vaswani et al. 2017. The coverage term compares finished sequences: a_ti is the weight of
    source token i when token t of y was predicted, in the last layer with cross-attention, averaged over its heads (Wu
    et al. have one attention of one head). A row is done when num_beams of its sequences are finished, or when no live
    sequence can reach the n best scores: log p only decreases and the coverage term is at most 0, so
    log p / lp(max_new_tokens) is an upper bound.
    """

    selected_by: ClassVar[tuple[str, float]] = ("coverage_penalty", 0)

    length_penalty: float = field(0.6, "α; a higher value prefers longer sequences", ge=0, le=10)
    coverage_penalty: float = field(0.0, "β; a higher value prefers sequences that attend to all of the source", ge=0)

    def score(self, logp: float, length: int) -> float:
        return logp / ((5 + length) / 6) ** self.length_penalty

    def is_done(self, finished: Sequence[float], best_live: float, length: int, config: GenerationConfig) -> bool:
        worst = finished[config.n - 1] if len(finished) >= config.n else -math.inf
        return len(finished) >= self.num_beams or self.score(best_live, config.max_new_tokens) <= worst

    def search(self, batch: GenerationBatch) -> BeamSearch:
        return CoverageSearch(self, batch) if self.coverage_penalty else BeamSearch(self, batch)


class CoverageSearch(BeamSearch):
    """A search whose scores include the coverage of the source."""

    spec: GnmtBeamSpec
    running: CoverageSequences

    def start(self) -> RunningSequences:
        return CoverageSequences(self.batch)

    def score(self, row: int, logp: float, length: int) -> float:
        return super().score(row, logp, length) + self.spec.coverage_penalty * self.running.log_coverage(row)


class CoverageSequences(RunningSequences):
    """Running sequences with the sum of their attention weights on each source token."""

    def __init__(self, batch: GenerationBatch) -> None:
        self.core = last_cross_attention(batch.model)
        super().__init__(batch)
        self.coverage_BM: Tensor | None = None
        self.padding_BM = None if batch.source is None else batch.source.padding_mask

    def logits(self) -> Tensor:
        with record(self.batch.model, self.core) as attentions:
            logits_BV = super().logits()
        weights_BM = (
            attentions[-1].weights()[:, :, -1].mean(dim=1, dtype=torch.promote_types(logits_BV.dtype, torch.float32))
        )
        self.coverage_BM = weights_BM if self.coverage_BM is None else self.coverage_BM + weights_BM
        return logits_BV

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.coverage_BM, self.padding_BM = (
            None if tensor is None else tensor.index_select(0, rows) for tensor in (self.coverage_BM, self.padding_BM)
        )

    def log_coverage(self, row: int) -> float:
        """Σ_i log min(Σ_t a_ti, 1); a sum of 0, to which weights may round, counts as the smallest normal number."""
        assert self.coverage_BM is not None
        coverage_M = self.coverage_BM[row]
        logs_M = coverage_M.clamp(torch.finfo(coverage_M.dtype).tiny, 1).log()
        return float(logs_M.sum() if self.padding_BM is None else logs_M[~self.padding_BM[row]].sum())
