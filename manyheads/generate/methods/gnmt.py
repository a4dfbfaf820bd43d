"""Beam search with the length penalty of Wu et al. 2016."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.generate.methods.beam import BeamSearch
from manyheads.spec import field


class GnmtBeamSpec(BeamSearch, kind="gnmt-beam"):
    """argmax_y log p(y | x) / lp(|y|) with lp(n) = ((5 + n) / 6)^α over the sequences found by `num_beams` beams

    Wu et al. 2016, arXiv 1609.08144, equation 14, without pruning, as in Tensor2Tensor and JoeyNMT. n includes the eos
    token; α = 0.6 as in Vaswani et al. 2017. A row is done when num_beams of its sequences are finished, or when no
    live sequence can reach the best score: log p only decreases, so log p / lp(max_new_tokens) is an upper bound.
    """

    length_penalty: float = field(0.6, "α; a higher value prefers longer sequences", ge=0, le=10)

    def score(self, logp: float, length: int) -> float:
        return logp / ((5 + length) / 6) ** self.length_penalty

    def is_done(self, finished: Sequence[float], best_live: float, length: int, limit: int) -> bool:
        return len(finished) >= self.num_beams or (bool(finished) and self.score(best_live, limit) <= finished[0])
