"""Beam search."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.decoding import DecodingSpec, GenerationConfig, Generators, Hypotheses
from manyheads.model.build import Model
from manyheads.parts.inputs import Inputs
from manyheads.spec import field


class BeamSpec(DecodingSpec, kind="beam"):
    """argmax_y log p(y | x) / lp(|y|) with lp(n) = ((5 + n) / 6)^α, over the sequences found by `num_beams` beams

    Wu et al. 2016, arXiv 1609.08144, equation 14, without the coverage term and pruning, as in Tensor2Tensor and
    JoeyNMT. n includes the eos token; α = 0.6 as in Vaswani et al. 2017. transformers and CTranslate2 divide by n^α,
    which gives the same scores only for α = 0.

    Each step computes the best (1 + number of eos tokens) · num_beams continuations. Those that end with eos and are
    among the best `num_beams` are finished; the best `num_beams` of the others continue. At max_new_tokens every
    sequence is finished. A row is done when `num_beams` of its sequences are finished, or when no live sequence can
    reach the best score. log p only decreases, so log p / lp(max_new_tokens) is an upper bound for a live sequence.
    A width of 1 is greedy decoding.
    """

    selected_by: ClassVar[tuple[str, float]] = ("num_beams", 1)

    num_beams: int = field(4, "beam width", ge=1, le=256)
    length_penalty: float = field(0.6, "α; a higher value prefers longer sequences", ge=0, le=10)

    @property
    def beams(self) -> int:
        return self.num_beams

    @torch.no_grad()
    def generate(
        self, model: Model, prompt: Inputs, source: Inputs | None, *, config: GenerationConfig, rng: Generators
    ) -> list[list[int]]:
        limit, width = config.max_new_tokens, self.num_beams
        hypotheses, device = Hypotheses(model, prompt, source, limit), prompt.tokens.device
        finished = FinishedTexts(prompt, width)
        eos = torch.tensor(config.eos_token_id, device=device, dtype=torch.long)
        live_BK = torch.zeros(prompt.batch_size, 1, device=device)  # log p of the live sequences, one per row at first
        for remaining in range(limit, 0, -1):
            logits_RV = hypotheses.logits()  # R = B·K rows
            wide = torch.promote_types(logits_RV.dtype, torch.float32)
            logp_RV = config.process_logits(logits_RV.log_softmax(dim=-1, dtype=wide), hypotheses.tokens, remaining)
            vocab, beams = logp_RV.shape[1], live_BK.shape[1]
            logp_BN = (logp_RV.unflatten(0, (-1, beams)) + live_BK[:, :, None]).flatten(1)
            best_BC, index_BC = logp_BN.topk(min((1 + len(eos)) * width, logp_BN.shape[1]))
            first_B1 = beams * torch.arange(len(index_BC), device=device)[:, None]
            row_BC, token_BC = index_BC // vocab + first_B1, index_BC % vocab
            ends_BC = torch.isin(token_BC, eos) | (remaining == 1)
            score_BC = (best_BC / self.divisor(limit - remaining + 1)).masked_fill(~ends_BC, -torch.inf)
            finished.add(hypotheses, row_BC, token_BC, score_BC)
            live_BK, which_BK = best_BC.masked_fill(ends_BC, -torch.inf).topk(min(width, best_BC.shape[1]))
            unfinished = finished.unfinished(live_BK[:, 0] / self.divisor(limit))
            if not len(unfinished):
                break
            live_BK, which_BK = live_BK[unfinished], which_BK[unfinished]
            hypotheses.extend(
                token_BC[unfinished].gather(1, which_BK).flatten(), row_BC[unfinished].gather(1, which_BK).flatten()
            )
        return finished.tokens

    def divisor(self, length: int) -> float:
        """lp(n) = ((5 + n) / 6)^α"""
        return float(((5 + length) / 6) ** self.length_penalty)


class FinishedTexts:
    """The best finished sequence of each row, its score, and the number of finished sequences."""

    def __init__(self, prompt: Inputs, num_beams: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(prompt.batch_size)]
        self.prompt_length, self.num_beams = prompt.length, num_beams
        self.rows = torch.arange(prompt.batch_size, device=prompt.tokens.device)  # the rows that are not done
        self.score = torch.full((prompt.batch_size,), -torch.inf, device=prompt.tokens.device)
        self.count = torch.zeros_like(self.rows)

    def add(self, hypotheses: Hypotheses, row_BC: Tensor, token_BC: Tensor, score_BC: Tensor) -> None:
        """Counts the finished candidates, whose scores are finite, and keeps one that is better than the row's best."""
        score_BC = score_BC[:, : self.num_beams]
        self.count = self.count + score_BC.isfinite().sum(dim=1)
        score, index = score_BC.max(dim=1)
        for i in (score > self.score).nonzero()[:, 0].tolist():
            row, token = int(row_BC[i, index[i]]), int(token_BC[i, index[i]])
            self.tokens[int(self.rows[i])] = [*hypotheses.tokens[row, self.prompt_length :].tolist(), token]
        self.score = torch.maximum(score, self.score)

    def unfinished(self, bound: Tensor) -> Tensor:
        """The rows that continue, given an upper bound of the score that each can reach."""
        unfinished = ((bound > self.score) & (self.count < self.num_beams)).nonzero()[:, 0]
        self.rows, self.score, self.count = self.rows[unfinished], self.score[unfinished], self.count[unfinished]
        return unfinished
